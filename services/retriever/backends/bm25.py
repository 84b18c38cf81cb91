"""BM25 over the words of pages (bm25s).

`Words` splits pages and queries into words. Latin and other letters: runs of letters in lower case.
Numbers keep their point and lose their commas. Korean, which attaches particles to words: morphemes
with meaning, found by kiwipiepy, or character bigrams, which need no model. Chinese and Japanese:
bigrams.

A query of one character finds pages, too. Each Chinese and Japanese character of a page is a word
beside the bigrams. So is the first syllable of a Korean word where Korean has bigrams, marked,
since particles follow it: only a query of one syllable asks for it.

A word divided at a line's end is a word beside its parts, since a hyphen there may be the word's
own (well-/known) or not (recommen-/dation). Chinese and Japanese go on without a sign, and Korean
may.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import installed_versions
from scorekit.text.markup import normalized
from services.retriever.backends.lines import continued_lines
from services.retriever.backends.ranking import Scores
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord, Step, no_step

NAME = "bm25"
Korean = Literal["morphemes", "bigrams"]
#: A text with every kind of character that has its own rule.
PROBE = (
    "Exports of STEEL fell 1,234.5 % in 2017: CO2, café. "
    "서울의 인구가 줄었다, 물 값 3만 원. 東京カナ, Wert\u00adpapier"
)
#: Lines with each kind of division.
DIVIDED_PROBE = (
    ("a well-", "known, recommen-", "dation"),
    ("Donau-", "dampf-", "schiff"),
    ("in 2020-", "2021"),
    ("温", "差"),
    ("대한", "민국은"),
    ("Wert\u00ad", "papier"),
)


class Bm25Builder:
    """Builds the BM25 index.

    korean: method for Korean words.
    k1, b: BM25's parameters.
    """

    name = NAME

    def __init__(self, korean: Korean = "morphemes", k1: float = 1.5, b: float = 0.75) -> None:
        self._korean: Korean = korean
        self._k1, self._b = k1, b

    def check(self) -> None:
        """Do nothing: these settings are always valid."""

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the index; return its settings. Raises UserError if no page has a word."""
        bm25s = _import_bm25s()
        words = Words(self._korean)
        texts = []
        for text in page_words(pages, words):
            texts.append(text)
            step(1)
        # Sorted, so that the same pages give the same files.
        ids = {word: k for k, word in enumerate(sorted({w for text in texts for w in text}))}
        if not ids:
            raise UserError(
                "no page has any text for bm25. Read text from the images (--ocr), or search by "
                "vectors of the images (--backend late)"
            )
        model = bm25s.BM25(k1=self._k1, b=self._b, method="lucene")
        tokenized = bm25s.tokenization.Tokenized([[ids[w] for w in text] for text in texts], ids)
        model.index(tokenized, show_progress=False)
        model.save(folder, show_progress=False)
        return {"korean": self._korean, "k1": self._k1, "b": self._b} | _word_versions(words)


def page_words(pages: Sequence[PageRecord], words: Words) -> Iterator[list[str]]:
    """Yield the words of each page; after them those that are divided between its lines."""
    for page, lines in zip(pages, continued_lines(pages), strict=True):
        full_words = words.of_page(page.text)
        yield full_words + words.of_divided(lines, full_words)


class Bm25Searcher:
    """Searches the index of `Bm25Builder`.

    Raises UserError if other versions of the libraries or rules would find other words."""

    name = NAME

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        bm25s = _import_bm25s()
        self._words = Words(settings["korean"])
        current = _word_versions(self._words)
        if changed := [name for name in current if settings.get(name) != current[name]]:
            raise UserError(
                f"the index was made with another version of {', '.join(changed)}: ingest it again"
            )
        self._model = bm25s.BM25.load(folder, show_progress=False)

    def check(self) -> None:
        """Do nothing: no server is needed."""

    def read(self, query: str) -> Any:
        """Return the ids of the query's words that are in the index."""
        return self._model.get_tokens_ids(self._words.of_query(query))

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the scores of each query; -inf for a page with none of its words."""
        return [self._scores(ids) for ids in queries]

    def _scores(self, ids: list[int]) -> Scores:
        scores: Scores = self._model.get_scores_from_ids(ids)
        np.putmask(scores, scores <= 0.0, -np.inf)
        return scores


def _import_bm25s() -> Any:
    """Return the library. Where jax is installed, it calls jax at its import, and jax takes three
    quarters of a GPU's memory at its first call: so jax is kept on the CPU.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import bm25s

    return bm25s


def _word_versions(words: Words) -> dict[str, str | None]:
    """Return the versions that the words of a text depend on.

    words: a digest of the probe's words."""
    libraries = ["bm25s", *(["kiwipiepy"] if words.korean == "morphemes" else [])]
    words_of_probe = [*words.of_page(PROBE), "", *words.of_query(PROBE)]
    probe_words = "\0".join([*words_of_probe, "", *words.of_divided(DIVIDED_PROBE)]).encode()
    return installed_versions(*libraries) | {"words": hashlib.sha256(probe_words).hexdigest()[:16]}


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
    """Finds the words of texts.

    korean: the method for Korean words.
    """

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

        lines: a line and those in which it goes on.
        page_words: words of the page. A Korean line that ends within a word looks like one that
        ends with it: so morphemes of the last and the first word together are returned if they are
        not words of the page.
        """
        words: list[str] = []
        korean: list[str] = []
        for first, *following in lines:
            line, start = (normalized("NFKC", t).lower().strip() for t in (first, following[0]))
            if divided := _DIVIDED.search(line):
                words += _join(divided[1], following)
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


def _join(start: str, following: Sequence[str]) -> Iterator[str]:
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
