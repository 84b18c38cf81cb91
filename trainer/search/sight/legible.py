"""A page in words: the lines that are large enough to read at the size at which it is shown.

So a policy without sight sees what one with sight does, and a crop shows it more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from scorekit.retrieval.wire import Page, TextBox
from scorekit.text.chatmarks import neutral
from trainer.search.records import BoxConvention, Region, View
from trainer.search.sight.config import SightConfig
from trainer.search.sight.pictures import PictureError
from trainer.search.sight.views import in_frame


def legible_lines(page: Page, view: View, sight: SightConfig) -> list[str]:
    """The text layer of what a view shows, in reading order: a box of the view's frame and its
    text. What is too small to read is a box without text; several in a row are one. Of the lines
    beyond `max_lines` is told how many they are; what a crop would show is told always.

    Raises PictureError where the index speaks of another picture than the view is of.
    """
    if (page.width, page.height) != (view.page_width, view.page_height):
        raise PictureError(f"the picture of page {view.page_id} has not the size of its text layer")
    zoom = view.height / (view.region[3] - view.region[1])
    seen = [(box, text) for box in page.boxes if (text := _text_within(box, view.region))]
    lines, left = [], sight.max_lines or len(seen)
    for large, group in groupby(
        seen, key=lambda one: one[0].letter_height * zoom >= sight.legible_px
    ):
        if large:
            told = list(group)
            lines += [f"{_place([box], view, sight)} {text}" for box, text in told[:left]]
            if more := len(told[left:]):
                lines.append(f"({more} more lines)" if more > 1 else "(1 more line)")
            left = max(0, left - len(told))
        else:
            small = [box for box, _ in group]
            of = f"{len(small)} lines" if len(small) > 1 else "a line"
            lines.append(f"{_place(small, view, sight)} ({of} too small to read)")
    return lines


def _text_within(box: TextBox, region: Region) -> str:
    """The letters that lie in a part of the page: all are taken for as wide; none where less than
    half of their height does."""
    left, top, right, bottom = region
    if min(box.y2, bottom) - max(box.y1, top) < (box.y2 - box.y1) / 2 or box.x1 >= box.x2:
        return ""
    text = neutral(" ".join(box.text.split()))
    letters = len(text) / (box.x2 - box.x1)
    first = round((max(left, box.x1) - box.x1) * letters)
    last = round((min(right, box.x2) - box.x1) * letters)
    return text[max(0, first) : max(0, last)].strip()


def _place(boxes: list[TextBox], view: View, sight: SightConfig) -> str:
    """Around some boxes, as far as the view shows them."""
    left, top, right, bottom = view.region
    around = (
        max(left, min(box.x1 for box in boxes)),
        max(top, min(box.y1 for box in boxes)),
        min(right, max(box.x2 for box in boxes)),
        min(bottom, max(box.y2 for box in boxes)),
    )
    return written_box(in_frame(around, view, sight.box_convention), sight.box_convention)


def written_box(box: Region, convention: BoxConvention) -> str:
    """As a policy writes one."""
    return f"[{', '.join(_numbers(box, convention))}]"


def _numbers(box: Region, convention: BoxConvention) -> Iterator[str]:
    return (f"{side:.3f}" if convention == "unit" else f"{side:.0f}" for side in box)
