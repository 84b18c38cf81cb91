"""Check the maximum number of episodes when questions have their own group sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.kits.trainer.searching.episodes import ask
from trainer.runs.batches import batch_indices
from trainer.search.config import SearchConfig
from trainer.search.training.upper_bounds import max_training_episodes, most_turns

SIZES = (2, 16, None, 4, 8, None, 3)
QUESTIONS = [ask(f"q{n}", n_agent=size) for n, size in enumerate(SIZES)]


def run(updates: int, **rollout: Any) -> SearchConfig:
    rl = {"num_updates": updates, "batch_size": 3, "warmup_updates": 0}
    return SearchConfig.model_validate({"rl": rl, "rollout": {"n_agent": 5} | rollout})


@pytest.mark.parametrize("updates", [1, 2, 5, 7, 11, 14])
def test_no_order_of_the_questions_plays_more(updates: int) -> None:
    cfg = run(updates)
    max_episodes = max_training_episodes(cfg, QUESTIONS)
    played = []
    for seed in range(40):
        indices = [i for u in range(1, updates + 1) for i in batch_indices(7, 3, u, seed)]
        played.append(sum(QUESTIONS[i].samples(5) for i in indices))
    assert max(played) <= max_episodes
    if updates % 7 == 0:  # full passes: all play the same number
        assert set(played) == {max_episodes} and max_episodes == updates * 3 // 7 * (
            2 + 16 + 5 + 4 + 8 + 5 + 3
        )
    if updates == 1:  # the bound is reached
        assert max(played) == max_episodes == 16 + 8 + 5


def test_dynamic_sampling_may_draw_the_largest_groups_again() -> None:
    assert max_training_episodes(run(2, dynamic_sampling=3), QUESTIONS) == (
        max_training_episodes(run(2), QUESTIONS) + 3 * 2 * 3 * 16
    )


def test_without_sizes_of_their_own_it_is_a_product() -> None:
    questions = [ask(f"q{n}") for n in range(7)]
    random.Random(0).shuffle(questions)
    assert max_training_episodes(run(5), questions) == 5 * 3 * 5


def test_the_most_turns_are_those_of_any_question() -> None:
    cfg = SearchConfig.model_validate({"episode": {"max_turns": 7}})
    assert most_turns(cfg, [ask(max_turns=3)]) == 3
    assert most_turns(cfg, [ask(max_turns=3), ask()]) == 7
    assert most_turns(cfg, [ask(max_turns=15), ask()]) == 15
