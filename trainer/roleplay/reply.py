"""A reply as the rewards read it: its lines, narration and speech.

    윤하는 창밖을 보며 웃었다.
    "오늘은 늦게까지 있을게요."

A line is one of: a `quote`, which is one pair of double quotation marks around the full line; a
`narration`, which has a letter and no double quotation mark; `other`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from scorekit.text.markup import UNSEEN, normalized

LineKind = Literal["narration", "quote", "other"]

#: Characters of a reply that are read; an answer of 220 tokens has about 600. The rest is ignored,
#: and such a reply does not count as two lines.
MAX_CHARACTERS = 8000
#: Opening mark -> closing mark of speech.
PAIRS = {'"': '"', "“": "”"}
CORNERS = {"「": "」", "『": "』"}
#: Double quotation marks of any kind, which a narration may not have. Marks of titles (『』 《》)
#: are not among them.
_MARKS = '"“”„‟＂〝〞〟«»「」'
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LETTER = re.compile(r"[^\W_]")


def message_text(message: Any) -> str:
    """Return the text of a prompt or completion in a form that trainers pass.

    That is a text, or a list of messages, of which the last one with text counts (`content` is a
    text, or a list of parts with `text`).
    """
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
    """Return the text in NFC without invisible characters; control characters become spaces.

    Every end of a line (CRLF, U+2028) becomes "\\n".
    """
    text = _SURROGATE.sub("\ufffd", text[: MAX_CHARACTERS + 1])
    text = _CONTROL.sub(" ", UNSEEN.sub("", normalized("NFC", text)))
    return "\n".join(text.splitlines())


def can_be_embedded(text: str) -> bool:
    """Return whether a text may be sent to an embedding server.

    It may not be blank, have a NUL or invalid Unicode, or be longer than what is read. The server
    reports a text with too many tokens.
    """
    return (
        len(text) <= MAX_CHARACTERS
        and "\0" not in text
        and not _SURROGATE.search(text)
        and bool(readable(text).strip())
    )


def has_letter(text: str) -> bool:
    """Return whether there is a letter or a digit of any script: "……" has none."""
    return _LETTER.search(text) is not None


@dataclass(frozen=True)
class ParsedReply:
    """A completion, parsed once for all reward functions.

    raw_text: as it was sampled.
    corner_quotes: whether 「」 and 『』 are quotation marks of speech.
    """

    raw_text: str
    corner_quotes: bool = False

    @cached_property
    def text(self) -> str:
        """Return `readable`, at most `MAX_CHARACTERS` characters of it."""
        return readable(self.raw_text)[:MAX_CHARACTERS]

    @property
    def too_long(self) -> bool:
        """Return whether a part of it is not read."""
        return len(self.raw_text) > MAX_CHARACTERS

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Return its lines without surrounding spaces; blank ones are left out."""
        return tuple(line.strip() for line in self.text.split("\n") if line.strip())

    @cached_property
    def kinds(self) -> tuple[LineKind, ...]:
        """Return the kind of each line."""
        return tuple(map(self._kind, self.lines))

    @cached_property
    def _speech(self) -> re.Pattern[str]:
        """Return a pattern of a closed pair with text, and no double quotation mark inside."""
        pairs = PAIRS | (CORNERS if self.corner_quotes else {})
        inside = f"[^{self._marks}\n]+"
        return re.compile("|".join(f"{a}({inside}){b}" for a, b in pairs.items()))

    @property
    def _marks(self) -> str:
        return _MARKS + ("『』" if self.corner_quotes else "")

    def _kind(self, line: str) -> LineKind:
        if not any(mark in line for mark in self._marks):
            return "narration" if has_letter(line) else "other"
        match = self._speech.fullmatch(line)
        return "quote" if match and match[match.lastindex or 0].strip() else "other"

    @cached_property
    def spoken(self) -> tuple[str, ...]:
        """Return the texts in closed pairs, of any line."""
        matches = self._speech.finditer("\n".join(self.lines))
        return tuple(text for match in matches if (text := match[match.lastindex or 0].strip()))

    @property
    def quote(self) -> str:
        """Return all spoken text; "" if no pair is closed."""
        return "\n".join(self.spoken)

    @cached_property
    def narration(self) -> str:
        """Return all other text: lines without pairs, and without an open quotation at their
        start."""
        lines_without_speech = self._speech.sub(" ", "\n".join(self.lines)).split("\n")
        lines = map(str.strip, lines_without_speech)
        return "\n".join(line for line in lines if line and line[0] not in self._marks)
