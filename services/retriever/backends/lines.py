"""Find which line of a page goes on in which, so that words divided at a line's end are found.

A line goes on in the next one below it, or, at the end of a column, in the next of the reading
order; the last line of a page in the first of the next page. Lines in letters of another size, and
cells of the same row, do not go on in each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from scorekit.retrieval.wire import TextBox
from services.retriever.index.records import PageRecord

#: Lines that follow a line, at most: a word may be divided several times.
_MOST_FOLLOWING = 3
#: Boxes of the reading order behind a line that are searched for the line below it: where columns
#: were written row by row, lines of the others stand between.
_LOOK_AHEAD = 8
#: Letter heights between a line and the next one below it, at most.
_LINE_GAP = 2.0
#: Letters larger or smaller by this factor belong to another text.
_OTHER_SIZE = 1.25
#: Lines at a page's end or start among which the text's own is searched for: the others are page
#: numbers, footers and headers.
_MARGIN_LINES = 4
#: Lines of a running head or foot, at most.
_RUNNING_LINES = 2
_HYPHENS = ("-", "\u2010", "\u00ad")

#: A line, and those in which it goes on.
Continued = list[str]


def continued_lines(pages: Sequence[PageRecord]) -> list[list[Continued]]:
    """Return the continued lines of each page. Pages are in the order of their documents.

    A line that goes on in the next page is one of both.
    """
    lines = [[part for box in page.boxes for part in _lines_of(box)] for page in pages]
    result = [list(_within(boxes)) for boxes in lines]
    for k, (page, following) in enumerate(pairwise(pages)):
        if (page.document, page.page + 1) != (following.document, following.page):
            continue
        last, first = _across(lines[k], lines[k + 1])
        if last and first:
            for continued in result[k], result[k + 1]:
                continued.append([last, first])
    return result


def _lines_of(box: TextBox) -> list[TextBox]:
    """Return the lines of a box: OCR may give a paragraph as one."""
    texts = [text for text in box.text.splitlines() if text.strip()]
    if len(texts) <= 1:
        return [box]
    height = (box.y2 - box.y1) / len(texts)
    return [
        box.model_copy(
            update={"text": text, "y1": box.y1 + k * height, "y2": box.y1 + (k + 1) * height}
        )
        for k, text in enumerate(texts)
    ]


def _within(boxes: Sequence[TextBox]) -> Iterator[Continued]:
    next_by_line = [_next_line(boxes, k) for k in range(len(boxes))]
    for k, box in enumerate(boxes):
        continued, line = [box.text], next_by_line[k]
        while line is not None and len(continued) <= _MOST_FOLLOWING:
            continued.append(boxes[line].text)
            line = next_by_line[line]
        if len(continued) > 1:
            yield continued


def _next_line(boxes: Sequence[TextBox], number: int) -> int | None:
    box = boxes[number]
    in_other_column = None
    for k in range(number + 1, min(len(boxes), number + 1 + _LOOK_AHEAD)):
        other = boxes[k]
        if not _has_same_size(box, other) or _is_same_row(box, other):
            continue
        if _is_below(box, other):
            return k
        if in_other_column is None:
            in_other_column = k
    return in_other_column


def _has_same_size(box: TextBox, other: TextBox) -> bool:
    smaller, larger = sorted((box.letter_height, other.letter_height))
    return larger <= _OTHER_SIZE * smaller


def _is_same_row(box: TextBox, other: TextBox) -> bool:
    if _is_upright(box) and _is_upright(other):
        return _share(box.x1, box.x2, other.x1, other.x2) > 0.5
    return _share(box.y1, box.y2, other.y1, other.y2) > 0.5


def _is_below(box: TextBox, other: TextBox) -> bool:
    """Return True if the other box is the next line of the same column."""
    gap = _LINE_GAP * max(box.letter_height, other.letter_height)
    if _is_upright(box) and _is_upright(other):  # the page is turned, or its lines run downwards
        near = max(other.x1 - box.x2, box.x1 - other.x2) < gap
        return near and _share(box.y1, box.y2, other.y1, other.y2) > 0
    below = -gap / 2 < other.y1 - box.y2 < gap and other.y1 > box.y1
    return below and _share(box.x1, box.x2, other.x1, other.x2) > 0


def _is_upright(box: TextBox) -> bool:
    return len(box.text) > 1 and box.y2 - box.y1 > box.x2 - box.x1


def _share(low: float, high: float, other_low: float, other_high: float) -> float:
    """Return how much of the shorter of two ranges both have in common, 0 to 1."""
    common = min(high, other_high) - max(low, other_low)
    return max(0.0, common / max(1e-9, min(high - low, other_high - other_low)))


def _across(boxes: Sequence[TextBox], following: Sequence[TextBox]) -> tuple[str, str]:
    """Return the last line of a page's own text, and the first of the next page's; or "".

    A hyphen at a line's end, and a small letter at the start of another, show what goes on. Running
    heads and feet, which both pages have, do not count.
    """
    size = _usual_size([*boxes, *following])
    head = {box.text for box in boxes[:_RUNNING_LINES]}
    foot = {box.text for box in following[-_RUNNING_LINES:]}
    last = [text for text in _texts(boxes, size)[-_MARGIN_LINES:] if text not in foot]
    first = [text for text in _texts(following, size)[:_MARGIN_LINES] if text not in head]
    divided = [text for text in last if text.endswith(_HYPHENS)]
    if divided:
        small = [text for text in first if text[0].islower()]
        return divided[-1], next(iter(small + first), "")
    return next(reversed(last), ""), next(iter(first), "")


def _texts(boxes: Sequence[TextBox], size: float) -> list[str]:
    """Return the lines in letters of a size that have a letter: a page number has none."""
    return [
        box.text
        for box in boxes
        if max(box.letter_height, size) <= _OTHER_SIZE * min(box.letter_height, size)
        and any(map(str.isalpha, box.text))
    ]


def _usual_size(boxes: Sequence[TextBox]) -> float:
    """Return the letter height of most letters, in pixels."""
    letters: Counter[float] = Counter()
    for box in boxes:
        letters[box.letter_height] += len(box.text)
    return max(letters, key=lambda height: (letters[height], height), default=1.0)
