"""Texts to words, for BM25. Pages and queries go the same way.

Latin and other letters: runs of letters, in small letters; a number keeps its point and loses its
commas. Korean, which writes particles onto its words: morphemes that carry meaning, as kiwipiepy
finds them; or pairs of neighbouring characters, which need no model. Chinese and Japanese: pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Literal

from scorekit.text.markup import normalised

Korean = Literal["morphemes", "bigrams"]

_HANGUL = "\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3"
_OTHER_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(
    rf"(?P<korean>[{_HANGUL}]+)|(?P<cjk>[{_OTHER_CJK}]+)"
    rf"|(?P<number>\d+(?:[.,]\d+)*)|(?P<word>(?:(?![{_HANGUL}{_OTHER_CJK}])[^\W\d_])+)"
)
_KOREAN = re.compile(f"[{_HANGUL}]")
#: Tags of morphemes that say what a text is about: nouns, numerals, stems, roots, adverbs.
_MEANING = ("NN", "NR", "VV", "VA", "XR", "MA")


class Words:
    """Finds the words of texts. korean: how those of Korean are found."""

    def __init__(self, korean: Korean) -> None:
        self.korean = korean
        self._kiwi: Any = None
        if korean == "morphemes":
            from kiwipiepy import Kiwi

            self._kiwi = Kiwi(num_workers=1)
            self._kiwi.tokenize("안녕하세요")  # the first call takes seconds

    def of(self, text: str) -> list[str]:
        """In their order, each as often as it is there."""
        text = normalised("NFKC", text).lower()
        found = [(run.start(), word) for run in _RUN.finditer(text) for word in self._of_run(run)]
        if self._kiwi is not None and _KOREAN.search(text):
            # All of the text: whether a syllable is a particle, the word before it tells.
            found += [
                (token.start, token.form)
                for token in self._kiwi.tokenize(text)
                if token.tag[:2] in _MEANING and _KOREAN.search(token.form)
            ]
        return [word for _, word in sorted(found, key=itemgetter(0))]

    def _of_run(self, run: re.Match[str]) -> Iterator[str]:
        found = run.group()
        match run.lastgroup:
            case "korean" if self._kiwi is not None:
                return
            case "korean" | "cjk":
                yield from _pairs(found)
            case "number":
                yield found.replace(",", "")
            case _:
                yield found


def _pairs(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
    yield from (run[k : k + 2] for k in range(len(run) - 1))
