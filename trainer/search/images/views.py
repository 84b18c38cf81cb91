"""Build the images of pages and crops, and convert boxes between frames.

A view stores its region in pixels of the page's full image. So a box converts to the page in one
step after any number of crops, and every crop is cut from the page.

A policy that reads only text gets the lines of a view that are large enough to read
(`legible_lines`): what one with images can read; and a crop shows more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import ceil, floor
from typing import TYPE_CHECKING, Literal

from scorekit.numeric import above
from scorekit.retrieval.wire import Page, TextBox
from scorekit.text.chat_marks import neutral
from trainer.search.config import SightConfig
from trainer.search.images.image_data import (
    ImageError,
    displayed_size,
    image_hash,
    read_image,
    size_within,
    write_png,
)
from trainer.search.records import BoxConvention, ImageView, Region

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


#: The reasons why a crop fails.
CropErrorReason = Literal["no_picture", "box_order", "box_outside", "box_small", "box_narrow"]


@dataclass(frozen=True, slots=True)
class ShownImage:
    """A view and its image.

    original: the image of `view.original` if it is another one.
    """

    view: ImageView
    png: bytes
    original: bytes | None = None


@dataclass(frozen=True, slots=True)
class CropFailure:
    """A failed crop.

    detail: the message to the policy.
    """

    reason: CropErrorReason
    detail: str


def page_view(
    page_id: str, image: bytes, sight: SightConfig, original_pixels: int | None = None
) -> ShownImage:
    """Return the view of a full page.

    image: its file, of any format.
    original_pixels: max area of its original; None: without one.
    Raises ImageError.
    """
    full_image = read_image(image)
    width, height = full_image.size
    region = (0.0, 0.0, float(width), float(height))
    return _resized_view("page", page_id, full_image, region, sight, original_pixels)


def crop_view(
    view: ImageView,
    box: Region,
    image: bytes,
    sight: SightConfig,
    original_pixels: int | None = None,
) -> ShownImage | CropFailure:
    """Return the crop of a box in a view, enlarged within the limits.

    box: in the view's frame, by `sight.box_convention`.
    image: the image file of the view's page.
    original_pixels: as in `page_view`.
    Raises ImageError if the image's size differs from that in the view.
    """
    region = crop_region(view, box, sight)
    if isinstance(region, CropFailure):
        return region
    full_image = read_image(image)
    if full_image.size != (view.page_width, view.page_height):
        raise ImageError(f"the image of page {view.page_id} has changed its size")
    return _resized_view("crop", view.page_id, full_image, region, sight, original_pixels)


def page_within(image: bytes, max_pixels: int) -> bytes:
    """Return the image file of a page, scaled down to an area of at most `max_pixels`.

    Raises ImageError.
    """
    full_image = read_image(image)
    width, height = full_image.size
    size = size_within(width, height, max_pixels)
    if size == full_image.size:
        return image
    return _png_of(full_image, (0.0, 0.0, float(width), float(height)), size)


def crop_region(view: ImageView, box: Region, sight: SightConfig) -> Region | CropFailure:
    """Return the region of the page that a box covers with its padding, in full pixels."""
    x1, y1, x2, y2 = in_pixels(box, view, sight.box_convention)
    if not (x1 < x2 and y1 < y2):
        return CropFailure("box_order", "x1 must be less than x2, and y1 less than y2")
    if x1 < 0 or y1 < 0 or x2 > view.width or y2 > view.height:
        return CropFailure("box_outside", "the box reaches out of the picture last shown")
    left, top, right, bottom = view.region
    x_scale, y_scale = (right - left) / view.width, (bottom - top) / view.height
    pad = sight.crop_padding
    region = (
        max(0.0, floor(left + (x1 - pad) * x_scale)),
        max(0.0, floor(top + (y1 - pad) * y_scale)),
        min(float(view.page_width), ceil(left + (x2 + pad) * x_scale)),
        min(float(view.page_height), ceil(top + (y2 + pad) * y_scale)),
    )
    width, height = region[2] - region[0], region[3] - region[1]
    if min(width, height) < sight.min_crop:
        return CropFailure(
            "box_small",
            f"the box covers {width:g} x {height:g} pixels of the page, of which each side needs "
            f"{sight.min_crop}: take a larger one",
        )
    if above(max(width, height), sight.max_aspect * min(width, height)):
        return CropFailure(
            "box_narrow",
            f"one side of the box is more than {sight.max_aspect:g} times the other: take a wider "
            "one",
        )
    return region


def in_pixels(box: Region, view: ImageView, convention: BoxConvention) -> Region:
    """Convert a box from the view's frame to pixels of the view."""
    x_scale, y_scale = _units(view, convention)
    x1, y1, x2, y2 = box
    return x1 * x_scale, y1 * y_scale, x2 * x_scale, y2 * y_scale


def in_frame(region: Region, view: ImageView, convention: BoxConvention) -> Region:
    """Convert a region of the page to the view's frame; it may exceed the view."""
    x_scale, y_scale = _units(view, convention)
    left, top, right, bottom = view.region
    x_scale *= (right - left) / view.width
    y_scale *= (bottom - top) / view.height
    x1, y1, x2, y2 = region
    return (x1 - left) / x_scale, (y1 - top) / y_scale, (x2 - left) / x_scale, (y2 - top) / y_scale


def _units(view: ImageView, convention: BoxConvention) -> tuple[float, float]:
    """Return the pixels per unit of the frame, in x and in y."""
    if convention == "pixel":
        return 1.0, 1.0
    parts = 1000 if convention == "thousand" else 1
    return view.width / parts, view.height / parts


def _resized_view(
    kind: Literal["page", "crop"],
    page_id: str,
    full_image: PILImage,
    region: Region,
    sight: SightConfig,
    original_pixels: int | None,
) -> ShownImage:
    left, top, right, bottom = region
    size = displayed_size(int(right - left), int(bottom - top), sight)
    png = _png_of(full_image, region, size)
    image, original, original_image = image_hash(png), None, None
    if original_pixels is not None:
        original = image
        width, height = size_within(int(right - left), int(bottom - top), original_pixels)
        if width * height > size[0] * size[1]:
            original_image = _png_of(full_image, region, (width, height))
            original = image_hash(original_image)
    view = ImageView(
        kind=kind,
        page_id=page_id,
        width=size[0],
        height=size[1],
        region=region,
        page_width=full_image.width,
        page_height=full_image.height,
        image=image,
        original=original,
    )
    return ShownImage(view, png, original_image)


def _png_of(full_image: PILImage, region: Region, size: tuple[int, int]) -> bytes:
    """Return the PNG of a region of a page in a size."""
    from PIL import Image

    return write_png(full_image.resize(size, Image.Resampling.BICUBIC, box=region))


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
