"""Split pages and queries into words for BM25.

Latin and other letters: runs of letters in lower case. Numbers keep their point and lose their
commas. Korean, which attaches particles to words: morphemes with meaning, found by kiwipiepy, or
character bigrams, which need no model. Chinese and Japanese: bigrams.

A query of one character finds pages, too. Each Chinese and Japanese character of a page is a word
beside the bigrams. So is the first syllable of a Korean word where Korean has bigrams, marked,
since particles follow it: only a query of one syllable asks for it.

A word divided at a line's end is a word beside its parts, since a hyphen there may be the word's
own (well-/known) or not (recommen-/dation). Chinese and Japanese go on without a sign, and Korean
may.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
#: The letters before a hyphen at a line's end, and those that a line begins with. Digits are not
#: joined: 2020-/2021 is no number.
_DIVIDED = re.compile(r"(?<![^\W\d_])([^\W\d_]++)[-\u2010\u00ad]\s*+$")
_START = re.compile(r"\s*([^\W\d_]+)")
#: A line that is the middle of a word.
_MIDDLE = re.compile(r"\s*[^\W\d_]+[-\u2010\u00ad]\s*")
_KOREAN_END = re.compile(f"(?<![{_HANGUL}])[{_HANGUL}]++$")
_KOREAN_START = re.compile(f"[{_HANGUL}]+")
_CJK = re.compile(f"[{_OTHER_CJK}]")
#: Characters that are not seen within a word: soft hyphen, word joiner, byte order mark.
_UNSEEN = dict.fromkeys((0x00AD, 0x2060, 0xFEFF))
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
        return self._words(_plain(text), is_page=True)

    def of_divided(
        self, lines: Iterable[Sequence[str]], page_words: Iterable[str] = ()
    ) -> list[str]:
        """Return the words that are divided between lines: they are words of the page, too.

        lines: a line and those in which it goes on. page_words: words of the page. A Korean line
        that ends within a word looks like one that ends with it: so morphemes of the last and the
        first word together are returned if they are not words of the page.
        """
        words: list[str] = []
        korean: list[str] = []
        for first, *following in lines:
            line, start = (normalized("NFKC", t).lower().strip() for t in (first, following[0]))
            if divided := _DIVIDED.search(line):
                words += _joined(divided[1], following)
            elif (end := _KOREAN_END.search(line)) and (begin := _KOREAN_START.match(start)):
                if self._kiwi is None:
                    words.append(end[0][-1] + begin[0][0])
                korean.append(end[0] + begin[0])
            elif _CJK.fullmatch(line[-1:]) and _CJK.fullmatch(start[:1]):
                words.append(line[-1] + start[0])
        if self._kiwi is not None and korean:
            page_words = set(page_words)
            words += [
                token.form
                for tokens in self._kiwi.tokenize(korean)
                for token in tokens
                if _is_word(token) and token.form not in page_words
            ]
        return words

    def of_query(self, text: str) -> list[str]:
        """Return all words of a query in order, with repetitions."""
        text = _plain(text)
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
                (token.start, token.form) for token in self._kiwi.tokenize(text) if _is_word(token)
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


def _is_word(token: Any) -> bool:
    """Return True if a token of kiwipiepy is a Korean morpheme with meaning."""
    return token.tag[:2] in _MEANING and bool(_KOREAN.search(token.form))


def _plain(text: str) -> str:
    return normalized("NFKC", text).lower().translate(_UNSEEN)


def _joined(start: str, following: Sequence[str]) -> Iterator[str]:
    """Yield a word from its first part and the lines that have the others."""
    word = start
    for text in following:
        text = normalized("NFKC", text).lower()
        if (part := _START.match(text)) is None:
            break
        word += part[1]
        if not _MIDDLE.fullmatch(text):
            break
    if word != start:
        yield word


def _bigrams(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
    yield from (run[k : k + 2] for k in range(len(run) - 1))
