"""Split documents into segments, and join runs of segments into blobs, with their positions.

A span counts characters of the record's `text`, where line ends may be written as backslash and n;
a list is joined by line ends. document[start:end] is the segment's text unless lines were joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scorekit.text.sentences import after_space, split_sentences
from synth.config import SegmentationConfig
from synth.reasons import Reason, RuleCode
from synth.sources.madlad import Document
from synth.sources.measure import category_weights, char_sums


class Segment(NamedTuple):
    """A segment.

    code: reason for rejection, or None.
    line, paragraph: indexes in the document.
    """

    text: str
    start: int
    end: int
    line: int
    paragraph: int
    code: Reason | RuleCode | None = None


class Blob(NamedTuple):
    """Consecutive segments as one text.

    first: index of the first segment.
    segments: their number."""

    text: str
    start: int
    end: int
    first: int
    segments: int


_LINE_END = {"real": re.compile(r"\n"), "escaped": re.compile(r"(?:\\r)?\\n|\n")}
_THAI = re.compile(r"[\u0e00-\u0e7f]")
_NO_SPACES = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
#: White space between Thai phrases, but not between figures.
_PHRASE_END = re.compile(r"(?<![0-9๐-๙])\s+|\s+(?![0-9๐-๙])")

_TAG = re.compile(
    r"</?(?:a|abbr|b|blockquote|body|br|button|center|code|div|em|font|form|h[1-6]|head|hr|html|i|"
    r"iframe|img|input|label|li|link|meta|nav|ol|option|p|pre|script|select|small|span|strong|"
    r"style|sub|sup|svg|table|tbody|td|th|tr|u|ul)\b[^<>]*>|<!--|<!doctype",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"&(?:nbsp|amp|lt|gt|quot|#\d{2,5});")
_URL = re.compile(r"(?:https?://|www\.)\S+")
_CODE = re.compile(
    r"^\s*(?:#include\b|import [\w.]+;?$|from [\w.]+ import |def \w+\(|class \w+[:({]|"
    r"(?:var|let|const) \w+\s*=|(?:public|private|static) \w+ \w+\s*[(={]|function\s*\w*\()|"
    r"\w\)\s*[;{]\s*$|=>\s*\{|\bfunction\s*\("
)
#: Beginnings of texts for which _CODE is searched, in addition to _CODE_SYMBOLS.
_CODE_STARTS = ("import ", "from ", "class ", "public ", "private ", "static ")
_CODE_SYMBOLS = "{}<>=;|\\^~$#_*+[]@"
#: Shares of the visible characters.
_MOST_SYMBOLS, _MOST_URL, _LEAST_LETTERS = 0.1, 0.5, 0.5
#: Three counts of characters in one sum; a segment has fewer characters than this.
_FIELD = 1 << 20


def whole_text(document: Document) -> str:
    """Return the text that the spans of a document refer to."""
    text = document.text
    return text if isinstance(text, str) else "\n".join(text)


def mode_code(document: Document, mode: str) -> Reason | None:
    """Return the code if segmentation.mode rejects a document, else None."""
    is_list = isinstance(document.text, list)
    if mode == "list_field" and not is_list:
        return Reason.NOT_A_LIST
    return Reason.NOT_A_STRING if mode == "newline" and is_list else None


def find_segments(
    full_texts: Sequence[str], cfg: SegmentationConfig, newlines: str
) -> list[list[Segment]]:
    """Return the segments of each document (from `whole_text`), rejected ones included."""
    cut = [_cut(full_text, cfg, newlines) for full_text in full_texts]
    codes = iter(
        _codes([segment.text for document_segments in cut for segment in document_segments], cfg)
    )
    return [
        [
            Segment(*segment[:5], code) if (code := next(codes)) else segment
            for segment in document_segments
        ]
        for document_segments in cut
    ]


def _cut(full_text: str, cfg: SegmentationConfig, newlines: str) -> list[Segment]:
    segments = []
    for start, end, line, paragraph in _lines(full_text, newlines):
        if end - start <= cfg.max_chars:
            segments.append(Segment(full_text[start:end], start, end, line, paragraph))
            continue
        for first, last in _split_long(full_text[start:end], cfg.max_chars):
            first, last = start + first, start + last
            segments.append(Segment(full_text[first:last], first, last, line, paragraph))
    return _merge_short(segments, cfg) if cfg.merge_short else segments


def _lines(full_text: str, newlines: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end, line, paragraph) of lines with text, without outer white space."""
    position = line = paragraph = 0
    blank = False  # whether a blank line came after the last one
    ends = [match.span() for match in _LINE_END[newlines].finditer(full_text)]
    for stop, following in [*ends, (len(full_text), len(full_text))]:
        raw = full_text[position:stop]
        text = raw.strip()
        if text:
            if blank and line:
                paragraph += 1
            start = position + (0 if len(raw) == len(text) else len(raw) - len(raw.lstrip()))
            yield start, start + len(text), line, paragraph
            line += 1
        blank = not text
        position = following


def _split_long(text: str, max_chars: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of sentences; for Thai, which does not mark them, runs of phrases."""
    for start, end in split_sentences(text):
        if end - start > max_chars and _THAI.search(text, start, end):
            yield from _pack_phrases(text, start, end, max_chars)
        else:
            yield start, end


def _pack_phrases(text: str, start: int, end: int, max_chars: int) -> Iterator[tuple[int, int]]:
    """Yield runs of phrases between spaces, each as long as max_chars allows."""
    begin, good = start, start
    for match in _PHRASE_END.finditer(text, start, end):
        if match.start() - begin > max_chars and good > begin:
            yield begin, good
            begin = after_space(text, good)
        good = match.start()
    if end - begin > max_chars and good > begin:
        yield begin, good
        begin = after_space(text, good)
    yield begin, end


def _merge_short(segments: list[Segment], cfg: SegmentationConfig) -> list[Segment]:
    """Join short segments with the next one of their paragraph, a last one with the previous."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if last is not None and len(last.text) < cfg.min_chars and _may_join(last, segment, cfg):
            merged[-1] = _join(last, segment)
        else:
            merged.append(segment)
    tidy: list[Segment] = []
    for segment in merged:
        if tidy and len(segment.text) < cfg.min_chars and _may_join(tidy[-1], segment, cfg):
            tidy[-1] = _join(tidy[-1], segment)
        else:
            tidy.append(segment)
    return tidy


def _may_join(left: Segment, right: Segment, cfg: SegmentationConfig) -> bool:
    fits = len(left.text) + len(right.text) < cfg.max_chars
    return left.paragraph == right.paragraph and fits


def _join(left: Segment, right: Segment) -> Segment:
    spaced = not (_NO_SPACES.match(left.text[-1]) and _NO_SPACES.match(right.text[0]))
    text = left.text + (" " if spaced else "") + right.text
    return left._replace(text=text, end=right.end)


def _codes(texts: list[str], cfg: SegmentationConfig) -> list[Reason | RuleCode | None]:
    """Return each text's rejection code, or None."""
    if not cfg.noise_rules:
        return [_length_code(text, cfg) for text in texts]
    counts = char_sums(texts, _counting_weights())
    return [
        RuleCode.TOO_LONG
        if len(text) > cfg.max_chars
        else _noise_code(text, count) or _length_code(text, cfg)
        for text, count in zip(texts, counts, strict=True)
    ]


def _length_code(text: str, cfg: SegmentationConfig) -> RuleCode | None:
    if len(text) > cfg.max_chars:
        return RuleCode.TOO_LONG
    return RuleCode.TOO_SHORT if len(text) < cfg.min_chars else None


def _noise_code(text: str, count: int) -> Reason | None:
    letters, symbols, spaces = count % _FIELD, count // _FIELD % _FIELD, count // _FIELD**2
    visible = max(1, len(text) - spaces)
    if ("<" in text and _TAG.search(text)) or ("&" in text and len(_ENTITY.findall(text)) > 1):
        return Reason.NOISE_HTML
    if ("://" in text or "www." in text) and (
        sum(map(len, _URL.findall(text))) > _MOST_URL * visible
    ):
        return Reason.NOISE_URL
    if symbols > _MOST_SYMBOLS * visible:
        return Reason.NOISE_CODE
    if (symbols or "(" in text or text.startswith(_CODE_STARTS)) and _CODE.search(text):
        return Reason.NOISE_CODE
    return Reason.NOISE_LETTERS if letters < _LEAST_LETTERS * visible else None


@lru_cache(1)
def _counting_weights() -> np.ndarray:
    """Return weights that count letters with marks, code symbols and white space in one sum."""
    weights = category_weights("L", "M") + category_weights("Z", "Cc", weight=_FIELD**2)
    for symbol in _CODE_SYMBOLS:
        weights[ord(symbol)] += _FIELD
    return weights


def find_blobs(
    full_text: str,
    segments: Sequence[Segment],
    lengths: Sequence[float],
    *,
    max_tokens: int,
    max_chars: int,
) -> Iterator[Blob]:
    """Yield runs of at most `max_tokens` with at least two segments that could be sources.

    lengths: of each segment. A run has no gaps: short lines are included, noise ends it. A
    paragraph that does not fit begins a new run; only a paragraph longer than a blob is split.
    """
    run: list[int] = []
    remaining, chars = float(max_tokens), max_chars
    for index, segment in enumerate(segments):
        if segment.code not in (None, RuleCode.TOO_SHORT):
            yield from _blob(full_text, segments, run)
            run, remaining, chars = [], float(max_tokens), max_chars
            continue
        need, size = lengths[index], len(segment.text) + 2
        required = need
        if run and segment.paragraph != segments[run[-1]].paragraph:
            paragraph = _paragraph_length(segments, lengths, index)
            required = paragraph if paragraph <= max_tokens else need
        if run and (required > remaining or size > chars):
            yield from _blob(full_text, segments, run)
            run, remaining, chars = [], float(max_tokens), max_chars
        if need <= remaining:
            run.append(index)
            remaining -= need + 1  # of the line end
            chars -= size
    yield from _blob(full_text, segments, run)


def _paragraph_length(segments: Sequence[Segment], lengths: Sequence[float], index: int) -> float:
    total, paragraph = -1.0, segments[index].paragraph
    while index < len(segments) and segments[index].paragraph == paragraph:
        total += lengths[index] + 1
        index += 1
    return total


def _blob(full_text: str, segments: Sequence[Segment], run: list[int]) -> Iterator[Blob]:
    if sum(not segments[i].code for i in run) < 2:
        return
    parts = [segments[run[0]].text]
    for before, after in pairwise(run):
        left, right = segments[before], segments[after]
        if left.paragraph != right.paragraph:
            parts.append("\n\n")
        else:
            parts.append("\n" if left.line != right.line else full_text[left.end : right.start])
        parts.append(right.text)
    first, last = segments[run[0]], segments[run[-1]]
    yield Blob("".join(parts), first.start, last.end, run[0], len(run))
