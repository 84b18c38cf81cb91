"""Rewards of episodes as they are played: every turn counts, and no end that was not chosen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.records import Trajectory
from trainer.search.reward.compute import with_reward
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.wellformed import format_error

PHASE1 = SearchRewardConfig(preset="phase1", w_judge=0, w_ndcg=0.9, w_format=0.1)
#: Of the second page of the deck, which these searches are shown second.
FOUND = 0.1 + 0.9 * 0.6309


def only(*turns: str, **cfg: Any) -> Trajectory:
    (one,) = played(scripted(*turns), [ask()], **cfg)
    return with_reward(one, PHASE1)


def value(trajectory: Trajectory) -> float | None:
    assert trajectory.reward is not None
    return trajectory.reward.value


def test_a_well_formed_episode_earns_by_the_order_of_its_pages() -> None:
    found = only(search("births"), search("births"))
    assert format_error(found) is None
    assert value(found) == pytest.approx(FOUND, abs=1e-4)


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
    """The ancestor's checker did not see the first turn."""
    found = only(wrong, search("births"), search("births"))
    assert format_error(found) == f"turn 1: {reason}"
    assert found.reward and found.reward.gated and value(found) == 0
    assert found.ndcg == pytest.approx(0.6309, abs=1e-4)


def test_a_box_outside_the_picture_is_a_fault_of_form() -> None:
    found = only(search("births"), crop(-5, 0, 100, 100))
    assert format_error(found) == "turn 2: box_outside"
    assert value(found) == 0


def test_a_forced_end_is_no_fault_of_form() -> None:
    """The ancestor's checker failed every forced episode."""
    found = only(*[search("births")] * 3, max_turns=2)
    assert (found.end, format_error(found)) == ("forced", None)
    assert value(found) == pytest.approx(FOUND, abs=1e-4)


def test_who_gives_up_earns_what_it_was_shown() -> None:
    found = only(search("births"), "<think>no</think><search_complete>false</search_complete>")
    assert (found.end, format_error(found), value(found)) == ("declined", None, pytest.approx(0.1))
