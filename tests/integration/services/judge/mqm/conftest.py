"""Provide a judge whose LLM finds the errors of careless.py."""

from __future__ import annotations

import pytest

from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from tests.integration.services.judge.mqm.careless import answers


@pytest.fixture(scope="module")
def upstream():
    fake = FakeOpenAI(respond=answers)
    with fake.running() as base:
        fake.base = base
        yield fake


@pytest.fixture(scope="module")
def url(upstream):
    with running_judge(upstream=upstream.base) as url:
        yield url


@pytest.fixture(autouse=True)
def _well(upstream):
    upstream.well()
    upstream.forget()
