"""Run bench/chaos/endurance.py in short: real processes, real signals, a real overload."""

from __future__ import annotations

import asyncio

import pytest

from bench.chaos.endurance import kill_under_load, overload, poison
from scorekit.server.fake import FakeBackend
from testing.servers import running_service


async def within(seconds, work):
    """Limit the time, against a hang only; an idle machine needs a tenth of it."""
    return await asyncio.wait_for(work, seconds)


@pytest.mark.parametrize(
    ("sigterms", "kills", "callers"), [(2, 1, 12), pytest.param(4, 2, 24, marks=pytest.mark.slow)]
)
def test_no_answer_is_lost_doubled_or_wrong_when_services_are_killed_under_load(
    sigterms, kills, callers
):
    counts = asyncio.run(within(600, kill_under_load(sigterms, kills, callers)))
    assert counts["signals_that_met_work"] == counts["signals"] == sigterms + kills
    assert counts["asked"] == counts["answered"] > 0
    assert counts["lost"] == counts["doubled"] == counts["wrong"] == counts["bad_exits"] == 0


def test_a_full_queue_refuses_and_answers_what_it_has_accepted():
    backend = FakeBackend(seconds_per_batch=0.02)
    with running_service(backend, max_queue_items=256) as url:
        accepted, refused = asyncio.run(within(600, overload(url, refusals=20)))
    assert accepted > 0
    assert len(refused) >= 20


def test_one_poison_sample_fails_alone_and_costs_few_calls_of_the_model():
    good, failures, calls = poison(256)
    assert good == 255
    assert failures == ["model_failure"]
    assert calls - 1 <= 2 * 8 + 1  # 256 is 2 to the power of 8
