"""Completions that TRL's vLLM has lost: TRL does not read finish_reason."""

from __future__ import annotations

import pytest

from trainer.roleplay.training.grpo import lost_completions

STOPS, MAX_LENGTH, VOCABULARY = {0, 2}, 4, 10


def problem(*ids_of_completions: list[int], max_length: int | None = MAX_LENGTH) -> str | None:
    return lost_completions(ids_of_completions, STOPS, max_length, VOCABULARY)


def test_completions_that_end_or_are_cut_at_the_limit_are_whole() -> None:
    assert problem([5, 2], [2], [5, 6, 7, 8], [5, 6, 7, 2], [9, 0]) is None


@pytest.mark.parametrize("ids", [[], [5], [5, 6, 7]])
def test_a_completion_that_ends_before_is_lost(ids: list[int]) -> None:
    text = problem([5, 2], ids, [5, 6, 7, 8])
    assert text is not None and text.startswith("vLLM broke 1 of 3 completions off")


def test_with_stop_texts_of_its_own_only_an_empty_one_is_lost() -> None:
    assert problem([5], [5, 6, 7], max_length=None) is None
    assert problem([5], [], max_length=None) is not None


@pytest.mark.parametrize("token_id", [-1, VOCABULARY])
def test_an_id_outside_the_vocabulary_is_told(token_id: int) -> None:
    text = problem([5, 2], [5, token_id, 2])
    assert text is not None and f"id {token_id}, but the policy has 10 ids" in text
