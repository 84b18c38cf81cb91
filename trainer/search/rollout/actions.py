"""Parse a turn of the policy into one action, or into the reason why it has none.

A valid turn is a think block that is not empty and, after it, exactly one action: a query, a box,
or the end. No other text is allowed. Text inside the think block is never an action.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import ConfigDict, TypeAdapter

from scorekit.text.markup import UNSEEN
from trainer.search.records import Region

THINK, SEARCH, BBOX, COMPLETE, ANSWER = "think", "search", "bbox", "search_complete", "answer"
#: The form of each action, as prompts and corrections quote it.
SPELLING: Final = {
    SEARCH: "<search>a query</search>",
    BBOX: "<bbox>[x1, y1, x2, y2]</bbox>",
    COMPLETE: "<search_complete>true</search_complete>",
}
#: The tags of a turn in their exact form: a model may have a token for each.
TAGS: Final = frozenset(f"<{end}{name}>" for name in (THINK, *SPELLING) for end in ("", "/"))
#: Max characters of a query. A retriever may accept fewer.
LONGEST_QUERY: Final = 1000

#: Reason of an invalid turn -> the message to the policy.
DETAILS: Final = {
    "no_think": "the turn has no think block: begin with <think>...</think>",
    "text_before_think": "something stands before the think block: begin with <think>",
    "unclosed_think": "the think block is not opened, or not closed: write <think>...</think>",
    "several_thinks": "there are several think blocks: write one, and the action behind it",
    "empty_think": "the think block is empty: write what you know and what is missing",
    "tag_in_think": "an action's tag stands inside the think block: write the action behind "
    "</think>, and no action's tag before it",
    "misspelt_tag": "a tag is misspelt: tags are written in small letters and without spaces",
    "unclosed_tag": "a tag is not opened, not closed, or closed by another one",
    "no_action": "there is no action behind the think block",
    "several_actions": "there are several actions: write exactly one a turn",
    "text_beside_action": "something stands beside the action: write it alone behind </think>",
    "answer": "there is an <answer>: another model answers, from the pages that you find",
    "empty_query": "the query is empty",
    "unreadable_query": "the query has characters that are none of a text",
    "overlong_query": f"the query has more than {LONGEST_QUERY} characters",
    "box_form": "the box is not four numbers in square brackets",
}


@dataclass(frozen=True, slots=True)
class Search:
    """A search query with single spaces between words and none at its ends."""

    query: str


@dataclass(frozen=True, slots=True)
class Crop:
    """A box with the numbers that the policy wrote. They are not checked against an image here."""

    box: Region


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of the search.

    done: the body is "true" in any case; otherwise the policy gave up.
    """

    done: bool


@dataclass(frozen=True, slots=True)
class Invalid:
    """A turn without a valid action.

    reason: a key of DETAILS.
    """

    reason: str

    def __post_init__(self) -> None:
        if self.reason not in DETAILS:
            raise ValueError(f"{self.reason!r} is no reason of DETAILS")

    @property
    def detail(self) -> str:
        """Return the message that the policy gets."""
        return DETAILS[self.reason]


Action: TypeAlias = Search | Crop | Complete | Invalid

# Possessive (*+): otherwise n blanks after a "<" are scanned n * n times.
_ACTION_TAG = re.compile(r"<\s*+(/?)\s*+(search_complete|search|bbox)\s*+(/?)\s*+>", re.IGNORECASE)
_THINK_TAG = re.compile(r"<\s*+(/?)\s*+think\s*+>", re.IGNORECASE)
_BOX = TypeAdapter(Region, config=ConfigDict(strict=True, allow_inf_nan=False))
_ANSWER_TAG = re.compile(r"<\s*+/?\s*+answer(?:\s[^<>]*+)?/?>", re.IGNORECASE)


def parse(text: str) -> Action:
    """Return the action in the text of a turn. Any text is accepted."""
    remainder = _text_after_think(text)
    return remainder if isinstance(remainder, Invalid) else _only_action(remainder)


def _text_after_think(text: str) -> str | Invalid:
    marks = list(_THINK_TAG.finditer(text))
    if any(mark.group() not in TAGS for mark in marks):
        return Invalid("misspelt_tag")
    if not marks:
        return Invalid("no_think")
    order = [mark[1] for mark in marks]
    if len(order) % 2 or order != ["", "/"] * (len(order) // 2):
        return Invalid("unclosed_think")
    if text[: marks[0].start()].strip():
        return Invalid("text_before_think")
    for opened, closed in zip(marks[::2], marks[1::2], strict=True):
        if _ACTION_TAG.search(text, opened.end(), closed.start()):
            return Invalid("tag_in_think")
    if len(marks) > 2:
        return Invalid("several_thinks")
    opened, closed = marks
    if _ANSWER_TAG.search(text, opened.end(), closed.start()):
        return Invalid("answer")
    if _is_blank(text[opened.end() : closed.start()]):
        return Invalid("empty_think")
    return text[closed.end() :]


def _is_blank(text: str) -> bool:
    """Return whether a text has no visible character."""
    return not any(char.isprintable() and not char.isspace() for char in UNSEEN.sub("", text))


def _only_action(text: str) -> Action:
    tags = list(_ACTION_TAG.finditer(text))
    if any(tag.group() not in TAGS for tag in tags):
        return Invalid("misspelt_tag")
    if _ANSWER_TAG.search(text):
        return Invalid("answer")
    if not tags:
        return Invalid("no_action")
    pairs = list(zip(tags[::2], tags[1::2], strict=False))
    if len(tags) % 2 or any(a[1] or not b[1] or a[2] != b[2] for a, b in pairs):
        return Invalid("unclosed_tag")
    if len(pairs) > 1:
        return Invalid("several_actions")
    opened, closed = pairs[0]
    if not _is_blank(text[: opened.start()] + text[closed.end() :]):
        return Invalid("text_beside_action")
    body = text[opened.end() : closed.start()]
    if opened[2] == COMPLETE:
        return Complete(body.strip().lower() == "true")
    return _query(body) if opened[2] == SEARCH else _box(body)


def _query(body: str) -> Search | Invalid:
    query = " ".join(body.split())
    if not query:
        return Invalid("empty_query")
    if any(ord(c) < 32 or "\x7f" <= c < "\xa0" or "\ud800" <= c <= "\udfff" for c in query):
        return Invalid("unreadable_query")
    return Invalid("overlong_query") if len(query) > LONGEST_QUERY else Search(query)


def _box(body: str) -> Crop | Invalid:
    try:
        return Crop(_BOX.validate_json(body.strip()))
    except ValueError:
        return Invalid("box_form")
