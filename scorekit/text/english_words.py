"""Estimate whether a few words are English, by a list of words that other languages seldom have.

It is for everyday texts, whose letter groups (scorekit/text/letter_groups.py) are not those of user
interfaces: "Merry Christmas".
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Made by tools/english_words.py.
TABLE = Path(__file__).parent / "english_words.txt"
#: Words beside names, which other languages have, too: a text of these and a name may be English.
_BESIDE_NAMES = _word_set(
    "admiral airport bank bay beach bridge bureau cape captain castle cave chairman chef city "
    "coach college county director doctor east emperor falls festival forest fort garden gate "
    "general governor great hall harbor hill hospital hotel institute island king lake "
    "manager market mayor minister mount mountain museum new north old palace park pass peak "
    "plaza port president prince princess professor province queen river road school singer "
    "sir south square station street temple terminal tomb tower university valley village "
    "wall west"
)
_WORD = re.compile(r"[^\W\d_]+")


def english_share(text: str, has_names: bool = False) -> float:
    """Return the share of a text's letters in words that are English rather than another language.

    It is 0 for a text without words, or with a letter that English lacks.
    has_names: names were left out of the text, so "Lake" and "Professor" count as English."""
    words = _WORD.findall(text.lower())
    if not text.isascii() and not all(map(str.isascii, words)):
        return 0.0
    total = sum(map(len, words))
    english, name_words = _words(), _BESIDE_NAMES if has_names else frozenset()
    return (
        sum(len(word) for word in words if word in english or word in name_words) / total
        if total
        else 0.0
    )


@lru_cache(maxsize=1)
def _words() -> frozenset[str]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))
