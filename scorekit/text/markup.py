"""Find what a translator leaves unchanged: code, links, tags, placeholders, numbers.

Texts are untrusted, so each search must take time linear in its text: repeated parts that may not
match are bounded or possessive. tests/integration/scorekit/text/test_linear.py checks that.
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
#: A role of reStructuredText, before its code.
_ROLE = r":[a-z][\w+.:-]{0,64}:(?=`)"
#: Invisible characters: zero-width ones, marks that reorder, fillers, variation selectors.
UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_KEPT = re.compile(f"{TAG}|{PLACEHOLDER}")
_MASKED = re.compile("|".join((CODE, URL, TAG, PLACEHOLDER, _ROLE, r"\d+(?:[.,:]\d+)*")), re.S)
#: Max combining marks on a letter: sorting them takes quadratic time, and no language has more.
_MOST_MARKS = 30


def mask(text: str) -> str:
    """Replace code, links, tags, placeholders and numbers, which are not translated, by spaces."""
    return _MASKED.sub(" ", text)


def placeholder_difference(src: str, mt: str) -> dict[str, int]:
    """Return the placeholders and tags (`{x}`, `%s`, `<b>`) whose counts differ.

    The value is the count in the translation minus that in the source. Attributes of a tag are not
    compared."""
    mt_counts, src_counts = _placeholders(mt), _placeholders(src)
    return {
        key: mt_counts[key] - src_counts[key]
        for key in mt_counts | src_counts
        if mt_counts[key] != src_counts[key]
    }


def _placeholders(text: str) -> Counter[str]:
    return Counter(
        _without_attributes(placeholder)
        if placeholder.startswith("<")
        else "".join(placeholder.split())
        for placeholder in _KEPT.findall(text)
    )


def _without_attributes(tag: str) -> str:
    name, *attributes = tag.split(maxsplit=1)
    return name + ("/>" if tag.endswith("/>") else ">") if attributes else tag


def normalized(form: Literal["NFC", "NFD", "NFKC", "NFKD"], text: str) -> str:
    """Normalize a text like `unicodedata.normalize`, in time linear in the text.

    A run of more than 30 combining marks, which no language has, is split by U+034F, as Unicode
    recommends (UAX 15, Stream-Safe Text Format).
    """
    if not text.isascii():
        text = _many_marks().sub(lambda run: run.group() + "\u034f", text)
    return unicodedata.normalize(form, text)


@lru_cache(maxsize=1)
def _many_marks() -> re.Pattern[str]:
    """Return the pattern of 30 characters in a row that normalization sorts."""
    marks = "".join(char for char in map(chr, range(0x300, 0x20000)) if is_sorted_mark(char))
    return re.compile(f"[{marks}]{{{_MOST_MARKS}}}")


def is_sorted_mark(char: str) -> bool:
    """Return True if normalization may move the character, or the first of its decomposition."""
    return unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) > 0
