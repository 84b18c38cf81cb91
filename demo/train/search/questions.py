"""Random questions without meaning: words of many texts between the small words of real questions.

A policy that learns to search with them learns which words of a question to take, not what the
demo's questions are about.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

_ENGLISH = """
how many much did does do the a an of in on at to from for by was were is are what which when where
who long big far and or than with each out get come it its have had that there could one day alone
most more
"""
_KOREAN = """
얼마나 얼마인가요 언제인가요 몇 명 몇 살까지 살았나요 내렸나요 평균 제일 많이 한 사람이 달랐나요
수는 것으로 보았나요 같은 해 있었나요 규모는
"""
#: Small words of English questions, and what Korean ones are made up with.
SMALL, KOREAN_SMALL = tuple(_ENGLISH.split()), tuple(_KOREAN.split())
_PARTICLES = ("에", "에는", "의", "은", "는", "이", "가", "을", "를", "에서", "")
_HANGUL = re.compile("[가-힣]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CONSONANTS, _VOWELS, _ENDS = "bcdfghjklmnprstvwz", "aeiou", ("", "n", "r", "s", "t")


def bare(word: str) -> str:
    """Return a question without its final punctuation. Commas stay, because copying is easier
    than omitting.
    """
    return word.strip("?.:;!")


def is_small(word: str) -> bool:
    """Return whether a word of a question says nothing about its subject."""
    return word.lower() in SMALL or word in KOREAN_SMALL


class Questions:
    """Random questions without end, drawn by `rng`.

    own, common: texts that the words are taken from, half of the words from each.
    """

    def __init__(
        self, corpus_texts: Iterable[str], common: Iterable[str], rng: random.Random
    ) -> None:
        self._rng = rng
        self._latin, self._korean = [], []
        for texts in (corpus_texts, common):
            words = sorted({word for text in texts for word in _WORD.findall(text)})
            words = [word for word in words if not is_small(word)]
            self._korean.append([word for word in words if _HANGUL.search(word)])
            self._latin.append([word for word in words if not _HANGUL.search(word)])
        self._syllables = sorted({letter for word in self._korean[0] for letter in word})

    def draw(self) -> str:
        """Return a random question; three of ten are Korean."""
        return self._korean_one() if self._rng.random() < 0.3 else self._latin_one()

    def _latin_one(self) -> str:
        rng, words = self._rng, list[str]()
        for _ in range(rng.randint(2, 5)):
            words += rng.choices(SMALL, k=rng.randint(1, 3))
            words += [self._latin_word() for _ in range(rng.choice((1, 1, 1, 2)))]
            words[-1] += "," if rng.random() < 0.1 else ""
        if rng.random() < 0.3:
            words.append(rng.choice(SMALL))
        return f"{words[0].capitalize()} {' '.join(words[1:])}?"

    def _korean_one(self) -> str:
        rng = self._rng
        words = [self._korean_word() for _ in range(rng.randint(2, 5))]
        for _ in range(rng.randint(1, 3)):
            words.insert(rng.randint(1, len(words)), rng.choice(KOREAN_SMALL))
        return f"{' '.join(words)} {rng.choice(KOREAN_SMALL)}?"

    def _latin_word(self) -> str:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.25:
            return str(rng.randint(1950, 2020) if rng.random() < 0.67 else rng.randint(1, 99))
        if kind < 0.75:
            word = rng.choice(rng.choice(self._latin))
            return word.lower() if rng.random() < 0.35 else word
        parts = [
            rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_ENDS)
            for _ in range(rng.randint(1, 3))
        ]
        return "".join(parts).capitalize() if rng.random() < 0.5 else "".join(parts)

    def _korean_word(self) -> str:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.3:
            return f"{rng.randint(1950, 2020)}{rng.choice(('년', '년에'))}"
        if kind < 0.4:
            return f"{rng.randint(1, 12)}{rng.choice(('월', '월에'))}"
        if kind < 0.8:
            word = rng.choice(rng.choice(self._korean))
        else:
            word = "".join(rng.choices(self._syllables, k=rng.randint(2, 4)))
        return word + rng.choice(_PARTICLES)
