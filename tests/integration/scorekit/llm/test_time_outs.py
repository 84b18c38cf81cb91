"""Check the timeout of an attempt: a provider's as configured, vLLM's by its work.

Within a deadline it is short enough for a retry."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.llm import Sampling
from scorekit.llm.dialects import DIALECTS
from testing.openai_server import FakeOpenAI
from tests.kits.llm import MESSAGES, client

LONG = Sampling(max_tokens=5120)
PROVIDERS = sorted(name for name in DIALECTS if name != "vllm")


def answered(fake, sampling=LONG, deadline_s=None, n=1, **settings):
    """Return the client that got an answer, after it was closed."""

    async def work():
        with fake.running() as url:
            async with client(url, fake, **settings) as llm:
                await llm.chat(MESSAGES, sampling, n=n, request_id="r", deadline_s=deadline_s)
                return llm

    return asyncio.run(work())


def granted(fake):
    """Return the timeout of the first request in seconds."""
    return float(fake.requests[0].headers["x-stainless-read-timeout"])


def hanging_once():
    """Yield a server that never answers its first request."""
    fake = FakeOpenAI()
    fake.hang = lambda body: len(fake.requests) == 1
    return fake


@pytest.mark.parametrize("dialect", PROVIDERS)
def test_a_provider_gets_the_time_that_is_written_however_much_it_is_asked_for(dialect):
    fake = FakeOpenAI()
    answered(fake, dialect=dialect, request_timeout_s=120)
    assert granted(fake) == 120


def test_vllm_gets_more_for_more_work_and_half_of_the_deadline_at_most():
    for deadline_s, seconds in ((None, 771), (600, 300), (100, 50)):
        fake = FakeOpenAI()
        answered(fake, dialect="vllm", request_timeout_s=120, deadline_s=deadline_s)
        assert granted(fake) == pytest.approx(seconds)


@pytest.mark.parametrize("dialect", PROVIDERS)
def test_a_provider_that_hangs_costs_one_retry(dialect):
    fake = hanging_once()
    llm = answered(fake, dialect=dialect, request_timeout_s=0.2, deadline_s=60)
    assert (llm.counts.requests, llm.counts.retries, llm.counts.failures) == (2, 1, 0)


def test_vllm_that_hangs_costs_one_retry_within_the_deadline():
    fake = hanging_once()
    llm = answered(fake, request_timeout_s=120, deadline_s=0.4)
    assert (llm.counts.requests, llm.counts.retries) == (2, 1)
