"""Check what the processes of a run make of its limits and stats."""

from __future__ import annotations

import pytest

from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.pipeline import merge_step_stats, part_of_limits


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 5, 8, 32])
def test_parts_of_a_limit_add_up_to_it(size: int, limit: int) -> None:
    cfg = AnsweringConfig.model_validate(
        {
            "generator": {"max_requests": limit, "requests_per_minute": 60.0},
            "judge": {"max_in_flight": limit},
        }
    )
    parts = [part_of_limits(cfg, rank, size) for rank in range(size)]
    expected = max(limit, size)  # each process may make at least one call
    assert sum(part.generator.max_requests for part in parts) == expected
    assert sum(part.judge.max_in_flight for part in parts) == expected
    assert sum(part.generator.max_tokens for part in parts) == 1_000_000
    rates = [part.generator.requests_per_minute or 0 for part in parts]
    assert sum(rates) == pytest.approx(60.0)


def test_stats_of_processes_add_up() -> None:
    parts: list[dict[str, float]] = [
        {"answers/ok": 2, "cost/generator_money": 1.5, "reward_waited_s": 2.0, "reward_mean": 1},
        {"answers/ok": 1, "answers/cached": 4, "reward_waited_s": 3.0, "reward_dropped": 1},
    ]
    assert merge_step_stats(parts) == {
        "answers/ok": 3,
        "answers/cached": 4,
        "cost/generator_money": 1.5,
        "reward_waited_s": 3.0,
        "reward_dropped": 1,
    }
