"""Whether an episode may be an example: what its policy wrote is a search, and nothing of what the
environment says stands in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

from scorekit.text.chatmarks import role_token
from trainer.search.actions import ANSWER, SPELLING, THINK
from trainer.search.curation.distil.spelling import plain
from trainer.search.records import Trajectory

#: Why one may not.
Fault = Literal[
    "no valid turn", "an invented observation", "text behind an action", "a tag in a thought"
]
_OPEN, _CLOSE = f"<{THINK}>", f"</{THINK}>"


def _spaced(name: str) -> str:
    return r"[\s_.\-]*+".join(map(re.escape, name.replace("_", "")))


_NAMES = "|".join(_spaced(name) for name in sorted((*SPELLING, ANSWER, THINK), key=len))
#: A tag of ours, or the beginning of one, as `plain` shows it.
_TAG = re.compile(rf"<[\s/\\]*+(?:{_NAMES})|[\[{{][\s/\\]*+(?:{_NAMES})\s*+[\]}}]")
_OWN = re.compile(rf"</?(?:{'|'.join((THINK, *SPELLING))})>")
_BEHIND = re.compile(rf"</(?:{'|'.join(SPELLING)})>\s*+(?=\S)")
#: What only the environment writes: marks of messages, tools and pictures; and its own sentences,
#: each on a line (`turns/prompt.py`, `sight/legible.py`). On a text as `plain` makes it.
_MARKS: Final = (
    r"<[|｜]|[|｜]>",
    r"<\s*+(?:/\s*+)?(?:image|img|picture|photo|video|page|crop|observation|obs|tool|result|information"
    r"|document|output|response|context|system|user|assistant|human|vision)s?(?:[\s_:-][^<>]{0,80})?"
    r"/?\s*+>",
    r"\[\s*+(?:/\s*+)?(?:image|img|picture|photo|screenshot|page|crop|observation)s?\s*+[\d#:]*+\s*+\]",
    r"\[\s*+system\s*+error",
    r"!\[[^\]\n]{0,200}\]\(|data:image/",
    r"^[^\w\n]*+(?:observations?|tool(?: (?:results?|outputs?|responses?))?|search results?"
    r"|retrieved(?: pages?)?|environment|system(?: error| message)?|user|assistant|관찰|관측"
    r"|검색\s?결과|도구(?:\s?(?:결과|응답))?|환경|시스템(?:\s?오류)?|사용자)\W{0,3}:",
)
_SENTENCES: Final = (
    r"^[^\S\n]*+no action was taken:",
    r"^[^\S\n]*+nothing was shown yet: search",
    r"^[^\S\n]*+boxes are in (?:pixels|thousandths|shares)\b",
    r"^[^\S\n]*+no page was found for this query",
    r"^[^\S\n]*+the (?:\d+ pages|one page) found for this query w",
    r"^[^\S\n]*+\d+ turns? left\.[^\S\n]*+$",
    r"^[^\S\n]*+(?:a part of )?page \S+"
    r"(?:\.|, (?:rank \d+ of \d+|\d+ wide and \d+ high)\b.*\.)[^\S\n]*+$",
    r"^[^\S\n]*+rank \d+ of \d+(?:, \d+ wide and \d+ high)?\.[^\S\n]*+$",
    r"^[^\S\n]*+\d+ wide and \d+ high\.[^\S\n]*+$",
    r"^[^\S\n]*+\[[\d.]+(?:\s*,\s*[\d.]+){3}\][ \t]+\S",
    r"^[^\S\n]*+\(\d+ more lines?\)[^\S\n]*+$",
)
_ENVIRONMENT = re.compile("|".join((*_MARKS, *_SENTENCES)), re.MULTILINE)


def target_fault(trajectory: Trajectory) -> Fault | None:
    """Why an episode is no example; None: it is one. Of its turns those count that would be
    learned: not the invalid ones, not what was put in the policy's place. A tag in a thought counts
    in any of its own: the row would show it."""
    turns = [turn for turn in trajectory.turns if not turn.forced and turn.action != "invalid"]
    if not turns:
        return "no valid turn"
    own = (turn.text for turn in trajectory.turns if not turn.forced)
    if any(has_tag(thought) for text in own for thought in thoughts(text, unclosed=True)):
        return "a tag in a thought"
    if any(invented(turn.text) is not None for turn in turns):
        return "an invented observation"
    return "text behind an action" if any(_BEHIND.search(turn.text) for turn in turns) else None


def repeated(trajectory: Trajectory) -> list[int]:
    """The policy's turns, counted from 0, that ask what the search before them has asked, in the
    same words."""
    found, last = [], None
    for number, turn in enumerate(turn for turn in trajectory.turns if not turn.forced):
        if turn.query is None or turn.action != "search":
            continue
        query = " ".join(plain(turn.query).split())
        if query == last:
            found.append(number)
        last = query
    return found


def invented(text: str) -> str | None:
    """The first part of a turn that imitates what the policy is told: a message, a tool's answer,
    the place of a picture; None without one."""
    told = _OWN.sub("\n", text)
    if found := _ENVIRONMENT.search(plain(told)):
        return found.group().strip()
    return role_token("", told)


def thoughts(text: str, *, unclosed: bool = False) -> list[str]:
    """What stands in the think blocks of a turn, in order. unclosed: also behind a tag that nothing
    closes."""
    found = [text[start:end] for start, end in thought_spans(text)]
    behind = text[text.rfind(_CLOSE) + 1 :].partition(_OPEN)[2] if unclosed else ""
    return [*found, behind] if behind else found


def thought_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where thoughts stand: each from its tag to the next that closes one."""
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            return
        yield start, end
        at = end + len(_CLOSE)


def has_tag(thought: str) -> bool:
    """Whether a thought has a tag of an action, an answer or a think block, however it is spelt:
    in other letters or blanks, as entities or escapes, in characters that look like it."""
    return _TAG.search(plain(thought)) is not None
