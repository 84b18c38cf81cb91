"""Check the statistics of a loop's rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.search.config import SearchRewardConfig
from trainer.search.rounds.config import RoundsConfig
from trainer.search.rounds.summary import RoundSummary, reward_words, rounds_table

PHASE1, FOCUSED = (SearchRewardConfig(preset=name) for name in ("phase1", "focused"))


def round_summary(
    name: str, reward: SearchRewardConfig, before: float, after: float
) -> RoundSummary:
    stats = [{"reward_mean": value, "ndcg_mean": value / 2} for value in (before, after)]
    return RoundSummary(
        name=name,
        folder=Path(name),
        updates=1,
        episodes=1,
        reward=reward_words(reward),
        held_out={"eval": (stats[0], stats[1])},
        counts={},
        steps={},
    )


def held_out(*rounds: RoundSummary) -> dict[str, list[str]]:
    named = [{"name": summary.name, "config": "x.yaml"} for summary in rounds]
    _, lines = rounds_table(RoundsConfig.model_validate({"rounds": named}), rounds)
    return {line[0]: line[1:] for line in lines if line[0].startswith("held out")}


def test_values_of_two_rewards_stand_in_no_line_together() -> None:
    lines = held_out(
        round_summary("a", PHASE1, 0.3, 0.6),
        round_summary("b", FOCUSED, 0.4, 0.5),
        round_summary("c", FOCUSED, 0.5, 0.7),
    )
    assert lines == {
        "held out: reward (0.9 NDCG + 0.1 form, forced_completion zero)": [
            "0.300 → 0.600",
            "– → –",
            "– → –",
        ],
        "held out: reward (1 judge's score)": ["– → –", "0.400 → 0.500", "0.500 → 0.700"],
        "held out: NDCG": ["0.150 → 0.300", "0.200 → 0.250", "0.250 → 0.350"],
    }


def test_rounds_of_one_reward_share_its_line() -> None:
    lines = held_out(round_summary("a", FOCUSED, 0.3, 0.6), round_summary("b", FOCUSED, 0.4, 0.5))
    assert lines["held out: reward"] == ["0.300 → 0.600", "0.400 → 0.500"]


@pytest.mark.parametrize(
    "other",
    [
        {"w_judge": 0.9},
        {"gate": True},
        {"ndcg_gold": "document"},
        {"forced_completion": "score"},
    ],
)
def test_equal_words_are_equal_rewards(other: dict[str, object]) -> None:
    assert reward_words(FOCUSED) == reward_words(SearchRewardConfig(preset="focused"))
    changed = SearchRewardConfig.model_validate({"preset": "focused", **other})
    assert reward_words(FOCUSED) != reward_words(changed)
