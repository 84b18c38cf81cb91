"""Split text into sentences by simple rules of punctuation.

They cover Latin, Chinese, Japanese, Korean, Arabic and Devanagari. A full stop after an
abbreviation, an initial, a number or an ordinal does not end a sentence. Thai has no sentence ends.

`python -m bench.sentences` measures the quality.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Marks that end a sentence if white space follows, and marks that need none. A match starts only
#: at the first mark of a run: starting within the run finds nothing new and costs time.
_SENTENCE_END = re.compile(
    r"(?<![.!?…‥।॥؟۔])[.!?…‥।॥؟۔]++[\"'”’»)\]]*+(?=\s)|[。！？｡]+[\"'”’»）」』】》〉)\]]*|．(?![0-9０-９])"
)
_ABBREVIATIONS = _words(
    "mr mrs ms dr prof st sr jr vs cf ca approx dept est inc ltd co corp gen col lt sgt rep "
    "sen gov rev hon eds etc bzw usw"
)
#: The word before a mark is searched in so many characters.
_LONGEST_WORD = 100
#: Characters above this one (Han, kana, Hangul) have no abbreviations with a full stop.
_LAST_ABBREVIATED = "\u2e80"
#: Abbreviations if a number follows: "No. 5", but "He said no. They left."
_BEFORE_FIGURES = _words(
    "no nos nr fig figs eq sec ch vol p pp jan feb mar apr jun jul aug sep sept oct nov dec "
    "okt dez abb abs art bd kap"
)
#: German writes its ordinals with a full stop: "der 2. Weltkrieg", "am 3. Oktober".
_BEFORE_ORDINALS = frozenset(
    {"der", "die", "das", "dem", "den", "des", "vom", "zum", "zur", "beim", "im", "jeder", "jede"}
)
_AFTER_ORDINALS = re.compile(
    r"(?:Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
    r"|Jan|Feb|Apr|Aug|Sept?|Okt|Nov|Dez|Jahrhundert|Jh)\b"
)
_INITIALS = re.compile(r"(?:[A-Za-zÀ-ɏΑ-я]\.)*[A-Za-zÀ-ɏΑ-я]")
_LATIN_END = re.compile(r"(?<=[\u3040-\u9fff\uac00-\ud7af])[A-Za-z.]+\Z")
#: Sentence ends before the number of a list item: "...the rice. 2. Then".
_ENDS = (".", "!", "?", "…")
_THAI = re.compile(r"[\u0e00-\u0e7f]")
_SPACE = re.compile(r"\s*")
_LINE = re.compile(r"[^\n\r\u2028\u2029]+")


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return the spans of the sentences of a line."""
    spans = []
    start, stop = after_space(text, 0), len(text.rstrip())
    for match in _SENTENCE_END.finditer(text, start, stop):
        if match.end() == stop:
            break
        following = after_space(text, match.end())
        if _ends_sentence(text, match, following):
            spans.append((start, match.end()))
            start = following
    return [*spans, (start, stop)] if start < stop else spans


def after_space(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def _ends_sentence(text: str, match: re.Match[str], after: int) -> bool:
    """Return True if the match ends a sentence. after: position of the text after the match."""
    mark, following = match.group(), text[after]
    if mark[0] in "。！？｡．":
        return True
    if following.islower():
        return False
    if mark[0] != "." or mark.startswith(".."):
        return True
    if match.start() and text[match.start() - 1] > _LAST_ABBREVIATED:
        return True
    before = text[max(0, match.start() - _LONGEST_WORD) : match.start()]
    lead, _, word = before.rpartition(" ")
    if _THAI.match(word[-1:]):  # a full stop does not end a Thai sentence: "9.30 น.", "พ.ศ."
        return False
    begins = len(word) == match.start() or lead.endswith(_ENDS)
    word = word[word.rfind("(") + 1 :].lstrip("\"'“‘[")
    if not word.isascii() and (latin := _LATIN_END.search(word)):  # "据Dr."
        word = latin.group()
    lower = word.lower()
    if lower in _ABBREVIATIONS or _INITIALS.fullmatch(word):  # "e.g.", "J.", "U.S."
        return False
    if lower in _BEFORE_FIGURES and following.isdigit():
        return False
    if word.replace(".", "").isdigit():  # "2023. 5. 1.", "1. First"; but "in 2023. The"
        ordinal = len(word) < 3 and (
            lead.rpartition(" ")[2].lower() in _BEFORE_ORDINALS
            or _AFTER_ORDINALS.match(text, after)
        )
        return not begins and following.isupper() and not ordinal
    return True


def sentence_starts(text: str) -> list[int]:
    """Return the start of each sentence of a text with any number of lines, and the text's length.

    A sentence reaches to the next start, including white space; the first starts at 0. A line end
    ends a sentence."""
    starts = [
        line.start() + start
        for line in _LINE.finditer(text)
        for start, _ in split_sentences(line.group())
    ]
    return [0, *starts[1:], len(text)] if text else [0]
