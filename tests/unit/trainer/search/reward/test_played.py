"""Check rewards of played episodes: every turn counts, but not an end that was forced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.config import SearchRewardConfig
from trainer.search.records import Trajectory
from trainer.search.reward import format_error, with_reward

PHASE1 = SearchRewardConfig(preset="phase1", w_judge=0, w_ndcg=0.9, w_format=0.1)
#: The reward for the deck's second page, which these searches display second.
EXPECTED_REWARD = 0.1 + 0.9 * 0.6309


def only(*turns: str, **cfg: Any) -> Trajectory:
    (sample,) = played(scripted(*turns), [ask()], **cfg)
    return with_reward(sample, PHASE1)


def value(trajectory: Trajectory) -> float | None:
    assert trajectory.reward is not None
    return trajectory.reward.value


def test_a_well_formed_episode_earns_by_the_order_of_its_pages() -> None:
    sample = only(search("births"), search("births"))
    assert format_error(sample) is None
    assert value(sample) == pytest.approx(EXPECTED_REWARD, abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("what a nice deck", "no_think"),
        ("<think>I will write <search>births</search></think>", "tag_in_think"),
        ("<think>a</think><search>births</search><search>again</search>", "several_actions"),
        ("<think>a</think><search> </search>", "empty_query"),
    ],
)
def test_a_wrong_first_turn_earns_nothing(wrong: str, reason: str) -> None:
    """Check the first turn, which the original's checker did not see."""
    sample = only(wrong, search("births"), search("births"))
    assert format_error(sample) == f"turn 1: {reason}"
    assert sample.reward and sample.reward.gated and value(sample) == 0
    assert sample.ndcg == pytest.approx(0.6309, abs=1e-4)


def test_a_box_outside_the_picture_is_a_fault_of_form() -> None:
    sample = only(search("births"), crop(-5, 0, 100, 100))
    assert format_error(sample) == "turn 2: box_outside"
    assert value(sample) == 0


def test_a_forced_end_is_no_fault_of_form_and_earns_nothing_in_phase_1() -> None:
    """Check forced episodes, which the original's checker always failed."""
    sample = only(*[search("births")] * 3, max_turns=2)
    assert (sample.end, format_error(sample)) == ("forced", None)
    assert sample.reward and not sample.reward.gated and value(sample) == 0
    scored = with_reward(sample, PHASE1.model_copy(update={"forced_completion": "score"}))
    assert value(scored) == pytest.approx(EXPECTED_REWARD, abs=1e-4)


def test_who_gives_up_earns_what_it_was_shown() -> None:
    sample = only(search("births"), "<think>no</think><search_complete>false</search_complete>")
    assert (sample.end, format_error(sample), value(sample)) == (
        "declined",
        None,
        pytest.approx(0.1),
    )
