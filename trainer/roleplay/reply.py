"""A reply as the rewards read it: its lines, what is narration in it, and what is said aloud.

    윤하는 창밖을 보며 웃었다.
    "오늘은 늦게까지 있을게요."

A line is one of: a `quote`, which is one pair of double quotation marks around all of it; a
`narration`, which has a letter and no double quotation mark; `other`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from scorekit.text.markup import UNSEEN, normalised

LineKind = Literal["narration", "quote", "other"]

#: So many characters of a reply are read, an answer of 220 tokens has some 600. What is longer is
#: read up to here, and is no reply of two lines.
LONGEST = 8000
#: Opening mark -> closing mark of what is said aloud.
PAIRS = {'"': '"', "“": "”"}
CORNERS = {"「": "」", "『": "』"}
#: Double quotation marks of any kind, which no narration has. Marks of titles (『』 《》) are none.
_MARKS = '"“”„‟＂〝〞〟«»「」'
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LETTER = re.compile(r"[^\W_]")


def message_text(message: Any) -> str:
    """The text of a prompt or completion as trainers pass it: a text, or the last of a list of
    messages that has text (`content` is a text, or a list of parts with `text`)."""
    if isinstance(message, str):
        return message
    for turn in reversed(list(message or ())):
        content = turn.get("content")
        if isinstance(content, str):
            return content
        if content:
            return "".join(part.get("text") or "" for part in content)
    return ""


def readable(text: str) -> str:
    """The text in NFC, without what nobody sees; control characters are spaces. Every end of a line
    (CRLF, U+2028) is "\\n"."""
    text = _SURROGATE.sub("\ufffd", text[: LONGEST + 1])
    text = _CONTROL.sub(" ", UNSEEN.sub("", normalised("NFC", text)))
    return "\n".join(text.splitlines())


def can_be_embedded(text: str) -> bool:
    """Whether a text may go to an embedding server: not blank, no NUL, not longer than is read, and
    Unicode. What has more tokens than its model reads, the server says."""
    return (
        len(text) <= LONGEST
        and "\0" not in text
        and not _SURROGATE.search(text)
        and bool(readable(text).strip())
    )


def has_letter(text: str) -> bool:
    """Whether there is a letter or a digit of any script: "……" has none."""
    return _LETTER.search(text) is not None


@dataclass(frozen=True)
class CutReply:
    """A completion, cut up once for all the functions that read it.

    given: as it was sampled. corner_quotes: whether 「」 and 『』 are quotation marks of speech.
    """

    given: str
    corner_quotes: bool = False

    @cached_property
    def text(self) -> str:
        """`readable`, at most `LONGEST` characters of it."""
        return readable(self.given)[:LONGEST]

    @property
    def too_long(self) -> bool:
        """Whether it goes on behind what is read."""
        return len(self.given) > LONGEST

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Its lines without the spaces around them; blank ones are left out."""
        return tuple(line.strip() for line in self.text.split("\n") if line.strip())

    @cached_property
    def kinds(self) -> tuple[LineKind, ...]:
        """What each line is."""
        return tuple(map(self._kind, self.lines))

    @cached_property
    def _speech(self) -> re.Pattern[str]:
        """A closed pair with something in it, and no double quotation mark inside."""
        pairs = PAIRS | (CORNERS if self.corner_quotes else {})
        inside = f"[^{self._marks}\n]+"
        return re.compile("|".join(f"{a}({inside}){b}" for a, b in pairs.items()))

    @property
    def _marks(self) -> str:
        return _MARKS + ("『』" if self.corner_quotes else "")

    def _kind(self, line: str) -> LineKind:
        if not any(mark in line for mark in self._marks):
            return "narration" if has_letter(line) else "other"
        found = self._speech.fullmatch(line)
        return "quote" if found and found[found.lastindex or 0].strip() else "other"

    @cached_property
    def spoken(self) -> tuple[str, ...]:
        """What stands in closed pairs, in whichever lines."""
        found = self._speech.finditer("\n".join(self.lines))
        return tuple(text for one in found if (text := one[one.lastindex or 0].strip()))

    @property
    def quote(self) -> str:
        """All that is said aloud; "" where no pair is closed."""
        return "\n".join(self.spoken)

    @cached_property
    def narration(self) -> str:
        """All that is not said aloud: the lines without what stands in pairs, or behind a mark that
        opens a line and is not closed in it."""
        told = self._speech.sub(" ", "\n".join(self.lines)).split("\n")
        return "\n".join(line for line in map(self._without_open_quote, told) if line)

    def _without_open_quote(self, line: str) -> str:
        line = line.strip()
        return "" if line[:1] in self._marks else line
