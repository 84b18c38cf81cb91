"""Documents -> segments, and runs of them -> blobs. Every one knows where it stands.

A span counts characters of `text` as the record has it, where line ends may be written as a
backslash and an n; of a list, the items joined by line ends. document[start:end] is the segment's
text unless lines were joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from scorekit.text.sentences import after_space, split_sentences
from synth.config import SegmentationConfig
from synth.sources.measure import category_weights, char_sums

if TYPE_CHECKING:
    import numpy as np

    from synth.sources.madlad import Document


class Segment(NamedTuple):
    """A segment. code: empty, or why it is left out. line, paragraph: which of the document."""

    text: str
    start: int
    end: int
    line: int
    paragraph: int
    code: str = ""


class Blob(NamedTuple):
    """Consecutive segments as one text. first: index of the first segment; segments: how many."""

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
#: What a text has or begins with that _CODE may find something in, beside _CODE_SYMBOLS.
_CODE_STARTS = ("import ", "from ", "class ", "public ", "private ", "static ")
_CODE_SYMBOLS = "{}<>=;|\\^~$#_*+[]@"
#: Shares of the visible characters.
_MOST_SYMBOLS, _MOST_URL, _LEAST_LETTERS = 0.1, 0.5, 0.5
#: Three counts of characters in one sum; a segment has fewer characters than this.
_FIELD = 1 << 20


def whole_text(document: Document) -> str:
    """What spans of this document count in."""
    text = document.text
    return text if isinstance(text, str) else "\n".join(text)


def mode_code(document: Document, mode: str) -> str:
    """Why segmentation.mode leaves a document out; empty where it does not."""
    is_list = isinstance(document.text, list)
    if mode == "list_field" and not is_list:
        return "not_a_list"
    return "not_a_string" if mode == "newline" and is_list else ""


def find_segments(
    wholes: Sequence[str], cfg: SegmentationConfig, newlines: str
) -> list[list[Segment]]:
    """The segments of each document (as of `whole_text`), those that are left out among them."""
    cut = [_cut(whole, cfg, newlines) for whole in wholes]
    codes = iter(_codes([piece.text for found in cut for piece in found], cfg))
    return [
        [Segment(*piece[:5], code) if (code := next(codes)) else piece for piece in found]
        for found in cut
    ]


def _cut(whole: str, cfg: SegmentationConfig, newlines: str) -> list[Segment]:
    pieces = []
    for start, end, line, paragraph in _lines(whole, newlines):
        if end - start <= cfg.max_chars:
            pieces.append(Segment(whole[start:end], start, end, line, paragraph))
            continue
        for first, last in _split_long(whole[start:end], cfg.max_chars):
            first, last = start + first, start + last
            pieces.append(Segment(whole[first:last], first, last, line, paragraph))
    return _merge_short(pieces, cfg) if cfg.merge_short else pieces


def _lines(whole: str, newlines: str) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, line, paragraph) of the lines that hold something, without outer white space."""
    position = line = paragraph = 0
    blank = False  # whether a blank line came after the last one
    ends = [match.span() for match in _LINE_END[newlines].finditer(whole)]
    for stop, following in [*ends, (len(whole), len(whole))]:
        raw = whole[position:stop]
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
    """Spans of the sentences; Thai, which marks none, in runs of phrases."""
    for start, end in split_sentences(text):
        if end - start > max_chars and _THAI.search(text, start, end):
            yield from _pack_phrases(text, start, end, max_chars)
        else:
            yield start, end


def _pack_phrases(text: str, start: int, end: int, max_chars: int) -> Iterator[tuple[int, int]]:
    """Runs of phrases between spaces, each as long as max_chars allows."""
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


def _merge_short(pieces: list[Segment], cfg: SegmentationConfig) -> list[Segment]:
    """Join what is under min_chars with the next of its paragraph, the last with the one before."""
    merged: list[Segment] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and len(last.text) < cfg.min_chars and _may_join(last, piece, cfg):
            merged[-1] = _join(last, piece)
        else:
            merged.append(piece)
    tidy: list[Segment] = []
    for piece in merged:
        if tidy and len(piece.text) < cfg.min_chars and _may_join(tidy[-1], piece, cfg):
            tidy[-1] = _join(tidy[-1], piece)
        else:
            tidy.append(piece)
    return tidy


def _may_join(left: Segment, right: Segment, cfg: SegmentationConfig) -> bool:
    fits = len(left.text) + len(right.text) < cfg.max_chars
    return left.paragraph == right.paragraph and fits


def _join(left: Segment, right: Segment) -> Segment:
    spaced = not (_NO_SPACES.match(left.text[-1]) and _NO_SPACES.match(right.text[0]))
    text = left.text + (" " if spaced else "") + right.text
    return left._replace(text=text, end=right.end)


def _codes(texts: list[str], cfg: SegmentationConfig) -> list[str]:
    """Why each text is left out; empty where it is not."""
    if not cfg.noise_rules:
        return [_length_code(text, cfg) for text in texts]
    counts = char_sums(texts, _counting_weights())
    return [
        "too_long"
        if len(text) > cfg.max_chars
        else _noise_code(text, count) or _length_code(text, cfg)
        for text, count in zip(texts, counts, strict=True)
    ]


def _length_code(text: str, cfg: SegmentationConfig) -> str:
    if len(text) > cfg.max_chars:
        return "too_long"
    return "too_short" if len(text) < cfg.min_chars else ""


def _noise_code(text: str, count: int) -> str:
    letters, symbols, spaces = count % _FIELD, count // _FIELD % _FIELD, count // _FIELD**2
    visible = max(1, len(text) - spaces)
    if ("<" in text and _TAG.search(text)) or ("&" in text and len(_ENTITY.findall(text)) > 1):
        return "noise_html"
    if ("://" in text or "www." in text) and (
        sum(map(len, _URL.findall(text))) > _MOST_URL * visible
    ):
        return "noise_url"
    if symbols > _MOST_SYMBOLS * visible:
        return "noise_code"
    if (symbols or "(" in text or text.startswith(_CODE_STARTS)) and _CODE.search(text):
        return "noise_code"
    return "noise_letters" if letters < _LEAST_LETTERS * visible else ""


@lru_cache(1)
def _counting_weights() -> np.ndarray:
    """Letters with their marks, symbols of code, white space: a field of the sum each."""
    weights = category_weights("L", "M") + category_weights("Z", "Cc", weight=_FIELD**2)
    for symbol in _CODE_SYMBOLS:
        weights[ord(symbol)] += _FIELD
    return weights


def find_blobs(
    whole: str,
    pieces: Sequence[Segment],
    lengths: Sequence[float],
    *,
    max_tokens: int,
    max_chars: int,
) -> Iterator[Blob]:
    """Runs of consecutive segments of at most `max_tokens`, of two that could stand alone or more.

    lengths: of each piece, as measured. A run is without gaps: short lines stay in it, noise ends
    it. A paragraph that would not fit any more begins a new one; only a paragraph that is too long
    for a blob of its own is cut.
    """
    run: list[int] = []
    room, chars = float(max_tokens), max_chars
    for index, piece in enumerate(pieces):
        if piece.code not in ("", "too_short"):
            yield from _blob(whole, pieces, run)
            run, room, chars = [], float(max_tokens), max_chars
            continue
        need, size = lengths[index], len(piece.text) + 2
        wanted = need
        if run and piece.paragraph != pieces[run[-1]].paragraph:
            paragraph = _paragraph_length(pieces, lengths, index)
            wanted = paragraph if paragraph <= max_tokens else need
        if run and (wanted > room or size > chars):
            yield from _blob(whole, pieces, run)
            run, room, chars = [], float(max_tokens), max_chars
        if need <= room:
            run.append(index)
            room -= need + 1  # of the line end
            chars -= size
    yield from _blob(whole, pieces, run)


def _paragraph_length(pieces: Sequence[Segment], lengths: Sequence[float], index: int) -> float:
    total, paragraph = -1.0, pieces[index].paragraph
    while index < len(pieces) and pieces[index].paragraph == paragraph:
        total += lengths[index] + 1
        index += 1
    return total


def _blob(whole: str, pieces: Sequence[Segment], run: list[int]) -> Iterator[Blob]:
    if sum(not pieces[i].code for i in run) < 2:
        return
    parts = [pieces[run[0]].text]
    for before, after in pairwise(run):
        left, right = pieces[before], pieces[after]
        if left.paragraph != right.paragraph:
            parts.append("\n\n")
        else:
            parts.append("\n" if left.line != right.line else whole[left.end : right.start])
        parts.append(right.text)
    first, last = pieces[run[0]], pieces[run[-1]]
    yield Blob("".join(parts), first.start, last.end, run[0], len(run))
