"""Split pages and queries into words for BM25.

Latin and other letters: runs of letters in lower case. Numbers keep their point and lose their
commas. Korean, which attaches particles to words: morphemes with meaning, found by kiwipiepy, or
character bigrams, which need no model. Chinese and Japanese: bigrams.

A query of one character finds pages, too. Each Chinese and Japanese character of a page is a word
beside the bigrams. So is the first syllable of a Korean word where Korean has bigrams, marked,
since particles follow it: only a query of one syllable asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Literal

from scorekit.text.markup import normalized

Korean = Literal["morphemes", "bigrams"]

_HANGUL = "\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3"
_OTHER_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(
    rf"(?P<korean>[{_HANGUL}]+)|(?P<cjk>[{_OTHER_CJK}]+)"
    rf"|(?P<number>\d+(?:[.,]\d+)*)|(?P<word>(?:(?![{_HANGUL}{_OTHER_CJK}])[^\W\d_])+)"
)
_KOREAN = re.compile(f"[{_HANGUL}]")
#: A query of one Hangul syllable.
_ONE_SYLLABLE = re.compile(r"[\W_]*([\uac00-\ud7a3])[\W_]*")
#: Follows the first syllable of a Korean word of several; no word has this character.
_FIRST = "*"
#: Tags of morphemes with meaning: nouns, numerals, stems, roots, adverbs.
_MEANING = ("NN", "NR", "VV", "VA", "XR", "MA")


class Words:
    """Finds the words of texts. korean: the method for Korean words."""

    def __init__(self, korean: Korean) -> None:
        self.korean = korean
        self._kiwi: Any = None
        if korean == "morphemes":
            from kiwipiepy import Kiwi

            self._kiwi = Kiwi(num_workers=1)
            self._kiwi.tokenize("안녕하세요")  # the first call takes seconds

    def of_page(self, text: str) -> list[str]:
        """Return all words of a page's text in order, with repetitions."""
        return self._words(normalized("NFKC", text).lower(), is_page=True)

    def of_query(self, text: str) -> list[str]:
        """Return all words of a query in order, with repetitions."""
        text = normalized("NFKC", text).lower()
        words = self._words(text, is_page=False)
        if match := _ONE_SYLLABLE.fullmatch(text):
            # Without words around it, kiwipiepy takes some nouns for verbs or determiners.
            words += [w for w in (match[1], match[1] + _FIRST) if w not in words]
        return words

    def _words(self, text: str, is_page: bool) -> list[str]:
        words = [
            (run.start(), word)
            for run in _RUN.finditer(text)
            for word in self._words_of_run(run, is_page)
        ]
        if self._kiwi is not None and _KOREAN.search(text):
            # Pass the full text: if a syllable is a particle depends on the word before it.
            words += [
                (token.start, token.form)
                for token in self._kiwi.tokenize(text)
                if token.tag[:2] in _MEANING and _KOREAN.search(token.form)
            ]
        return [word for _, word in sorted(words, key=itemgetter(0))]

    def _words_of_run(self, run: re.Match[str], is_page: bool) -> Iterator[str]:
        text = run.group()
        match run.lastgroup:
            case "korean" if self._kiwi is not None:
                return
            case "korean":
                yield from _bigrams(text)
                if is_page and len(text) > 1:
                    yield text[0] + _FIRST
            case "cjk":
                yield from _bigrams(text)
                if is_page and len(text) > 1:
                    yield from text
            case "number":
                yield text.replace(",", "")
            case _:
                yield text


def _bigrams(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
    yield from (run[k : k + 2] for k in range(len(run) - 1))
