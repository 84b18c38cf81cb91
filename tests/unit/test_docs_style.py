"""The pages of the documentation are easy to read: short lines, short sentences, one title."""

from __future__ import annotations

import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not path.read_text(encoding="utf-8").startswith("<!-- Made from the code")
]
_BLOCK = re.compile(r"^( *)```.*?^\1```\s*?$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|etc|cf|approx|No)\.")


def prose_lines(text: str) -> list[str]:
    """Return the lines of a page that are neither code nor tables nor headings."""
    lines = _BLOCK.sub("", text).splitlines()
    return [line for line in lines if not line.lstrip().startswith(("|", "#", "!["))]


def sentences(text: str) -> list[int]:
    """Return the number of words of each sentence of a page's prose; a list item ends one."""
    prose = _COMMENT.sub("", "\n".join(prose_lines(text)))
    prose = _ABBREVIATION.sub("", _LINK.sub(r"\1", prose))
    prose = re.sub(r"`[^`\n]*`", "code", prose)
    parts = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", prose)
    return [len(words) for part in parts if (words := re.findall(r"[\w'’-]*[^\W\d]\w*", part))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_lines_of_prose_are_under_120_characters(path: Path) -> None:
    links_shortened = [_LINK.sub(r"\1", line) for line in prose_lines(path.read_text("utf-8"))]
    assert [line for line in links_shortened if len(line) >= 120] == []


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_sentences_are_under_20_words_on_average(path: Path) -> None:
    words = sentences(path.read_text(encoding="utf-8"))
    assert not words or statistics.mean(words) < 20, statistics.mean(words)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_page_has_one_title_and_says_something(path: Path) -> None:
    text = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert sentences(text)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_block_in_a_list_item_is_indented_by_four_spaces(path: Path) -> None:
    """The website would end a list at a block with fewer, and number the next item 1."""
    lines = _BLOCK.sub("```", path.read_text(encoding="utf-8")).splitlines()
    pairs = pairwise(lines)
    assert [line for before, line in pairs if not before and re.match(r" {1,3}\S", line)] == []
    fences = re.findall(r"^( *)```", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(len(indent) in (0, 4) for indent in fences)


def test_a_list_item_and_a_code_block_do_not_join_sentences() -> None:
    text = "# A\n\n- One two.\n- Three four five\n\n```\na b c d\n```\n\nSix `a b` [seven](x.md).\n"
    assert sentences(text) == [2, 3, 3]
