"""Check that the policy's instructions are true and their examples valid."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kits.trainer.searching.episodes import ask
from trainer.search.config import EpisodeConfig, SightConfig
from trainer.search.records import ImageView
from trainer.search.rollout.actions import DETAILS, SPELLING, Complete, Crop, Search, parse
from trainer.search.rollout.prompt import correction, crop_line, opening, page_line, turns_left

VIEW = ImageView(
    kind="page",
    page_id="deck_1",
    width=840,
    height=448,
    region=(0, 0, 1280, 720),
    page_width=1280,
    page_height=720,
    image="",
)


def instructions_text(**cfg: Any) -> str:
    return opening(ask(), EpisodeConfig.model_validate(cfg))[0].text


def examples(text: str) -> list[Any]:
    """Return the actions in the text, with numbers for x1 to y2."""
    matches = re.findall(r"<(search|bbox|search_complete)>(.*?)</\1>", text)
    bodies = [(name, re.sub(r"[xy]\d", "7", body)) for name, body in matches]
    return [parse(f"<think>a</think>\n<{name}>{body}</{name}>") for name, body in bodies]


def test_every_example_is_spelt_right() -> None:
    """Check the spelling: a closing tag in the original's correction was wrong."""
    right = [Search("a query"), Crop((7, 7, 7, 7)), Complete(True)]
    assert examples(instructions_text()) == right
    for detail in DETAILS.values():
        text = correction(detail, VIEW, SightConfig(), box=True)
        assert examples(text) == right and detail in text
        assert not re.search(r"</?(?!think>|/?search>|bbox|search_complete|answer)\w+>", text)
    assert set(SPELLING) == {"search", "bbox", "search_complete"}


@pytest.mark.parametrize(
    ("convention", "phrase", "frame"),
    [
        ("pixel", "pixels", "0 <= x1 < x2 <= 840 and 0 <= y1 < y2 <= 448"),
        ("thousand", "from 0 to 1000", "0 <= x1 < x2 <= 1000 and 0 <= y1 < y2 <= 1000"),
        ("unit", "from 0 to 1;", "0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1"),
    ],
)
def test_the_convention_of_boxes_is_told(convention, phrase, frame) -> None:
    cfg = EpisodeConfig.model_validate({"sight": {"box_convention": convention}})
    assert phrase in instructions_text(sight={"box_convention": convention})
    assert frame in correction("why", VIEW, cfg.sight, box=True)
    assert "search first" in correction("why", None, cfg.sight, box=True)
    assert "<=" not in correction("why", VIEW, cfg.sight, box=False)


def test_the_budget_and_what_is_shown_are_told() -> None:
    assert "You have 7 turns." in instructions_text() and "You have 1 turn." in instructions_text(
        max_turns=1
    )
    row = opening(ask(max_turns=3), EpisodeConfig())
    assert "You have 3 turns." in row[0].text and row[1].text == "Question: How many births?"
    assert (
        "as the lines of it" not in instructions_text()
        and "as the lines of it" in instructions_text(observation="text")
    )
    assert "shows the first 3 that" in instructions_text(pages_per_search=3)


def test_instructions_of_ones_own_stand_as_they_are_with_the_turns_of_the_row() -> None:
    custom_text = "Find {what}, in {turns}."
    assert instructions_text(instructions=custom_text, max_turns=1) == "Find {what}, in 1 turn."


def test_each_part_of_the_line_can_be_left_out() -> None:
    def lines(*parts: str) -> list[str]:
        cfg = EpisodeConfig.model_validate({"observation_line": parts})
        return [page_line(VIEW, 2, 9, cfg), crop_line(VIEW, cfg), turns_left(4, cfg)]

    assert lines("page", "rank", "frame", "turns_left") == [
        "Page deck_1, rank 2 of 9, 840 wide and 448 high.",
        "A part of page deck_1, 840 wide and 448 high.",
        "4 turns left.",
    ]
    assert lines("page") == ["Page deck_1.", "A part of page deck_1.", ""]
    assert lines("frame")[:2] == ["840 wide and 448 high."] * 2
    assert lines("turns_left") == ["", "", "4 turns left."] and lines() == ["", "", ""]
