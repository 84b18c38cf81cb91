"""What no translator translates, found in a text: code, links, tags, placeholders, numbers.

Texts come from anywhere, so a search costs time in proportion to its text, whatever that holds:
parts that may run on without a match are bounded or possessive.
tests/unit/scorekit/text/test_linear.py holds it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache
from typing import Literal

CODE = r"```.*?(?:```|\Z)|``[^`]++``|`[^`\n]++`"
#: An address has at most 64 characters before its @, and 63 in a label after it.
URL = (
    r"\b(?:https?|ftp)://[^\s<>\"'）」]+|\bwww\.[^\s<>\"']+"
    r"|\b[\w.+-]{1,64}+@[\w-]{1,63}+\.[\w.-]+"
)
TAG = r"</?[A-Za-z][A-Za-z0-9:_-]*+(?:\s[^<>=]*+=[^<>]*)?\s?/?>"
PLACEHOLDER = (
    r"\{\{\s*+[\w.:@!\[\]-]++\s*+\}\}|\$?\{\s*+[\w.:@!\[\]-]*+\s*+\}|%(?:\([\w.-]+\))?(?:\d+\$)?[#+-]?\d*(?:\.\d+)?[sdifgxXrc@]"
    r"(?![A-Za-z])|%[A-Za-z_]\w*%|\$t?\([\w.:]+\)"
)
#: reStructuredText's, before its code.
_ROLE = r":[a-z][\w+.:-]{0,64}:(?=`)"
#: Characters that nobody sees: zero-width ones, marks that reorder, fillers, variation selectors.
UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_KEPT = re.compile(f"{TAG}|{PLACEHOLDER}")
_MASKED = re.compile("|".join((CODE, URL, TAG, PLACEHOLDER, _ROLE, r"\d+(?:[.,:]\d+)*")), re.S)
#: So many marks on one letter say nothing: to sort them costs their number squared.
_MOST_MARKS = 30


def mask(text: str) -> str:
    """The text without what no translator translates: code, links, tags, placeholders, numbers."""
    return _MASKED.sub(" ", text)


def placeholder_difference(src: str, mt: str) -> dict[str, int]:
    """Placeholders and tags (`{x}`, `%s`, `<b>`) whose counts differ: how many more the translation
    has; negative where some are missing. Attributes of a tag are not compared."""
    ours, theirs = _placeholders(mt), _placeholders(src)
    return {key: ours[key] - theirs[key] for key in ours | theirs if ours[key] != theirs[key]}


def _placeholders(text: str) -> Counter[str]:
    return Counter(
        _without_attributes(found) if found.startswith("<") else "".join(found.split())
        for found in _KEPT.findall(text)
    )


def _without_attributes(tag: str) -> str:
    name, *attributes = tag.split(maxsplit=1)
    return name + ("/>" if tag.endswith("/>") else ">") if attributes else tag


def normalized(form: Literal["NFC", "NFD", "NFKC", "NFKD"], text: str) -> str:
    """`unicodedata.normalize`, in time linear in the text.

    A run of more than 30 combining marks is broken by U+034F, which is Unicode's own answer
    (UAX 15, Stream-Safe Text Format). No language writes one.
    """
    if not text.isascii():
        text = _many_marks().sub(lambda run: run.group() + "\u034f", text)
    return unicodedata.normalize(form, text)


@lru_cache(maxsize=1)
def _many_marks() -> re.Pattern[str]:
    """30 characters in a row that are sorted when a text is normalised."""
    marks = "".join(char for char in map(chr, range(0x300, 0x20000)) if is_sorted_mark(char))
    return re.compile(f"[{marks}]{{{_MOST_MARKS}}}")


def is_sorted_mark(char: str) -> bool:
    """Whether normalising may move the character, or the first of what it stands for."""
    return unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) > 0
