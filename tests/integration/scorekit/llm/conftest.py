"""Fixtures for the tests of the LLM client: a fake OpenAI server."""

from __future__ import annotations

import pytest

from testing.openai_server import FakeOpenAI


@pytest.fixture
def fake():
    """Return a server that answers as each test says."""
    return FakeOpenAI()


@pytest.fixture
def url(fake):
    """Yield the base URL of the running server."""
    with fake.running() as base_url:
        yield base_url
