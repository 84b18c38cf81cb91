"""Describe a view as text: its lines that are large enough to read.

So a policy that reads only text gets what one with images can read, and a crop shows more.
"""

from __future__ import annotations

from itertools import groupby

from scorekit.retrieval.wire import Page, TextBox
from scorekit.text.chat_marks import neutral
from trainer.search.config import SightConfig
from trainer.search.images.image_data import ImageError
from trainer.search.images.views import in_frame
from trainer.search.records import ImageView, Region


def legible_lines(page: Page, view: ImageView, sight: SightConfig) -> list[str]:
    """Return the lines of a view in reading order: a box in the view's frame and its text.

    Lines too small to read have a box without text; adjacent ones share a box. Lines beyond
    `max_lines` are only counted, but boxes of small lines are always listed. Raises ImageError if
    the page of the index has another size than that of the view.
    """
    if (page.width, page.height) != (view.page_width, view.page_height):
        raise ImageError(f"the picture of page {view.page_id} differs in size from its text layer")
    zoom = view.height / (view.region[3] - view.region[1])
    seen = [(box, text) for box in page.boxes if (text := _text_within(box, view.region))]
    lines, max_left = [], sight.max_lines or len(seen)
    for large, group in groupby(
        seen, key=lambda entry: entry[0].letter_height * zoom >= sight.legible_px
    ):
        if large:
            readable = list(group)
            lines += [
                f"{_box_text([box], view, sight)} {text}" for box, text in readable[:max_left]
            ]
            if more := len(readable[max_left:]):
                lines.append(f"({more} more lines)" if more > 1 else "(1 more line)")
            max_left = max(0, max_left - len(readable))
        else:
            small = [box for box, _ in group]
            count_text = f"{len(small)} lines" if len(small) > 1 else "a line"
            lines.append(f"{_box_text(small, view, sight)} ({count_text} too small to read)")
    return lines


def _text_within(box: TextBox, region: Region) -> str:
    """Return the letters of a line within a region, as if all letters had the same width.

    "" if less than half of their height is within it.
    """
    left, top, right, bottom = region
    if min(box.y2, bottom) - max(box.y1, top) < (box.y2 - box.y1) / 2 or box.x1 >= box.x2:
        return ""
    text = neutral(" ".join(box.text.split()))
    letters = len(text) / (box.x2 - box.x1)
    first = round((max(left, box.x1) - box.x1) * letters)
    last = round((min(right, box.x2) - box.x1) * letters)
    return text[max(0, first) : max(0, last)].strip()


def _box_text(boxes: list[TextBox], view: ImageView, sight: SightConfig) -> str:
    """Return the box around some boxes, clipped to the view, as a policy writes one."""
    left, top, right, bottom = view.region
    bounds = (
        max(left, min(box.x1 for box in boxes)),
        max(top, min(box.y1 for box in boxes)),
        min(right, max(box.x2 for box in boxes)),
        min(bottom, max(box.y2 for box in boxes)),
    )
    digits = 3 if sight.box_convention == "unit" else 0
    sides = in_frame(bounds, view, sight.box_convention)
    return f"[{', '.join(f'{side:.{digits}f}' for side in sides)}]"
