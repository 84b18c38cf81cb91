"""Check how many tokens of random successes are drawn beside rare ones."""

from __future__ import annotations

from typing import Any

import pytest

from evidence.loop.rare import drawn_rows, learned_tokens


def row(name: str, tokens: int) -> dict[str, Any]:
    return {"id": name, "action_mask": [0] + [1] * tokens}


def test_turns_without_a_loss_are_not_counted() -> None:
    mask = [0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1]
    assert learned_tokens({"action_mask": mask}) == 6
    assert learned_tokens({"action_mask": mask, "leave_out": [0, 2]}) == 1


@pytest.mark.parametrize(("target", "count"), [(0, 0), (5, 0), (6, 1), (24, 2), (26, 3), (99, 4)])
def test_rows_are_drawn_up_to_the_nearest_number_of_tokens(target: int, count: int) -> None:
    rows = [row(str(number), 10) for number in range(4)]
    chosen = drawn_rows(rows, target, seed=1)
    assert len(chosen) == count and chosen == drawn_rows(rows, target, seed=1)


def test_another_seed_draws_others() -> None:
    rows = [row(str(number), 10) for number in range(20)]
    first, second = (drawn_rows(rows, 100, seed) for seed in (1, 2))
    assert len(first) == len(second) == 10 and first != second
