"""Check which texts written by a policy make its episode unusable as an example."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.cold import text_episode
from tests.kits.trainer.searching.curated import make_question
from tests.kits.trainer.searching.episodes import COMPLETE, crop, played, scripted, search
from tests.kits.trainer.searching.finished import page
from trainer.search.config import EpisodeConfig
from trainer.search.records import Trajectory
from trainer.search.rollout.prompt import (
    correction,
    crop_line,
    nothing_found,
    page_line,
    turns_left,
)
from trainer.search.steps.targets import invented, repeated, target_error

CFG = EpisodeConfig(observation="text")
SIGHT = CFG.sight
ENVIRONMENT_PHRASES = [
    page_line(page("deck_3"), 2, 10, CFG),
    page_line(page("deck_3"), 2, 10, EpisodeConfig(observation_line=["rank"])),
    page_line(page("deck_3"), 2, 10, EpisodeConfig(observation_line=["frame"])),
    page_line(page("deck_3"), 2, 10, EpisodeConfig(observation_line=["page"])),
    crop_line(page("deck_3"), CFG),
    nothing_found(0),
    nothing_found(1),
    nothing_found(4),
    "[40, 48, 234, 60] Births by month",
    "[40, 48, 234, 60] (3 lines too small to read)",
    "(1 more line)",
    turns_left(1, CFG),
    turns_left(4, CFG),
    correction("the query is empty", None, SIGHT, box=False).splitlines()[0],
    correction("the box is empty", page("deck_3"), SIGHT, box=True).splitlines()[-1],
    correction("the box is empty", None, SIGHT, box=True).splitlines()[-1],
]
MARKS = [
    "<|im_start|>user",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<| image |>",
    "<image>",
    "< image 3 >",
    "<img src='page.png'/>",
    "[IMAGE]",
    "[image 2]",
    "![page](page.png)",
    "data:image/png;base64,AAAA",
    "<tool_response>\n{}\n</tool_response>",
    "<observation>births: 5</observation>",
    "<information>births</information>",
    "＜image＞",
    "&lt;image&gt;",
    "[System Error: the crop failed]",
    "so there is a [System Error in the crop",
    "Observation: births were 5",
    "Tool result: births",
    "Search results: deck_3",
    "User: here is the page",
    "관찰: 출생아 수는 5명",
    "검색 결과: 3쪽",
]
HARMLESS = [
    "I have 3 turns left. The next query has to be about births.",
    "Page 3 of the report is about births, rank it first.",
    "Search results so far are about deaths: next births.",
    "a box at [10, 20, 30, 40] would do",
    "The user wants births; the image is too small, so crop it.",
    "3 < 5, and births > deaths",
    "다음으로 검색 결과를 좁혀야 한다.",
]


def accepted(text: str) -> Trajectory:
    """Return an episode of an earlier release, which accepted text after an action."""
    episode = text_episode(make_question("q"), text, COMPLETE)
    episode.turns[0].action = "search"
    return episode


@pytest.mark.parametrize("phrase", [*ENVIRONMENT_PHRASES, *MARKS])
def test_what_the_environment_says_is_found_wherever_a_turn_says_it(phrase: str) -> None:
    assert invented(f"<think>births {phrase}</think>\n<search>births</search>") or invented(
        f"<think>births\n{phrase}</think>\n<search>births</search>"
    )
    for text in (
        f"<think>births\n{phrase}\nso on</think>\n<search>births</search>",
        f"<think>{phrase}</think>\n<search>births</search>",
        f"<think>births</think>\n<search>births</search>\n{phrase}",
    ):
        assert target_error(accepted(text)) == "an invented observation"


def test_every_line_that_episodes_are_told_is_found() -> None:
    """Check real observations: pages as lines, crops, corrections, searches without new pages."""
    turns = [search("births"), crop(0, 0, 400, 200), "garbage", crop(9, 9, 1, 1)]
    turns += [search(word) for word in ("births", "births", "births", "rainfall")]
    (done,) = played(scripted(*turns), observation="text", max_turns=9)
    observations = [turn.observation for turn in done.turns if turn.observation]
    assert len(observations) == 8
    for observation in observations:
        assert invented(f"<think>look\n{observation}</think>\n<search>x</search>"), observation


@pytest.mark.parametrize("thought", HARMLESS)
def test_a_thought_about_what_was_told_is_none_of_it(thought: str) -> None:
    turn = f"<think>{thought}</think>\n<search>births</search>"
    assert invented(turn) is None
    assert target_error(text_episode(make_question("q"), turn, COMPLETE)) is None


@pytest.mark.parametrize("repeated_query", ["births in Asia", "Births  in asia", "ｂirths in Asia"])
def test_a_query_that_comes_again_at_once_is_found(repeated_query: str) -> None:
    both = search("births in Asia"), search(repeated_query)
    assert repeated(text_episode(make_question("q"), *both, COMPLETE)) == [1]
    turns = both[0], crop(1, 2, 3, 4), "garbage", both[1], both[1], COMPLETE
    assert repeated(text_episode(make_question("q"), *turns)) == [3, 4]


def test_a_query_that_comes_again_later_is_none() -> None:
    assert not repeated(
        text_episode(make_question("q"), search("a"), search("b"), search("a"), COMPLETE)
    )


def test_words_behind_an_action_are_found() -> None:
    more = search("births") + "\nand now the total"
    assert target_error(accepted(more)) == "text behind an action"
    assert (
        target_error(text_episode(make_question("q"), more, COMPLETE)) is None
    )  # invalid and not trained
    assert (
        target_error(text_episode(make_question("q"), search("births") + " \n", COMPLETE)) is None
    )


def test_what_is_not_learned_does_not_count() -> None:
    """Check that invalid turns are masked and forced turns omitted."""
    invalid = "<think>User: births</think>"
    assert (
        target_error(text_episode(make_question("q"), invalid, search("births"), COMPLETE)) is None
    )
    assert target_error(text_episode(make_question("q"), "garbage")) == "no valid turn"
    episode = text_episode(
        make_question("q"), search("births"), COMPLETE + "\nUser: more", end="forced"
    )
    episode.turns[-1].forced = True
    assert target_error(episode) is None
