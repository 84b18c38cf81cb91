"""Pages and crops as the policy is shown them, and the frames in which it writes its boxes.

A view knows which part of its page it shows, in pixels of the page's own picture. So there is one
step from a box to the page, however many crops lie between, and every crop is cut from the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Literal

from scorekit.numeric.thresholds import above
from trainer.search.records import BoxConvention, Region, View
from trainer.search.sight.config import SightConfig
from trainer.search.sight.pictures import (
    PictureError,
    picture_hash,
    read_picture,
    shown_size,
    write_png,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

#: Why a box is not cut out.
CropFault = Literal["no_picture", "box_order", "box_outside", "box_small", "box_narrow"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A view and its picture."""

    view: View
    png: bytes


@dataclass(frozen=True, slots=True)
class NotCropped:
    """A box that is not cut out. detail: why, in words for the policy."""

    reason: CropFault
    detail: str


def page_view(page_id: str, image: bytes, sight: SightConfig) -> Shown:
    """A whole page. image: its picture, in whatever form. Raises PictureError."""
    picture = read_picture(image)
    width, height = picture.size
    return _shown("page", page_id, picture, (0.0, 0.0, float(width), float(height)), sight)


def crop_view(view: View, box: Region, image: bytes, sight: SightConfig) -> Shown | NotCropped:
    """What a box cuts out of a view, as large as may be shown.

    box: in the view's frame, by `sight.box_convention`. image: the picture of the view's page.
    Raises PictureError where that is another one than the view is of.
    """
    region = crop_region(view, box, sight)
    if isinstance(region, NotCropped):
        return region
    picture = read_picture(image)
    if picture.size != (view.page_width, view.page_height):
        raise PictureError(f"the picture of page {view.page_id} has changed its size")
    return _shown("crop", view.page_id, picture, region, sight)


def crop_region(view: View, box: Region, sight: SightConfig) -> Region | NotCropped:
    """The whole pixels of the page that a box of the view covers, with its padding."""
    x1, y1, x2, y2 = in_pixels(box, view, sight.box_convention)
    if not (x1 < x2 and y1 < y2):
        return NotCropped("box_order", "x1 must be less than x2, and y1 less than y2")
    if x1 < 0 or y1 < 0 or x2 > view.width or y2 > view.height:
        return NotCropped("box_outside", "the box reaches out of the picture last shown")
    left, top, right, bottom = view.region
    across, down = (right - left) / view.width, (bottom - top) / view.height
    pad = sight.crop_padding
    region = (
        max(0.0, floor(left + (x1 - pad) * across)),
        max(0.0, floor(top + (y1 - pad) * down)),
        min(float(view.page_width), ceil(left + (x2 + pad) * across)),
        min(float(view.page_height), ceil(top + (y2 + pad) * down)),
    )
    width, height = region[2] - region[0], region[3] - region[1]
    if min(width, height) < sight.min_crop:
        return NotCropped(
            "box_small",
            f"the box covers {width:g} x {height:g} pixels of the page, of which each side needs "
            f"{sight.min_crop}: take a larger one",
        )
    if above(max(width, height), sight.max_aspect * min(width, height)):
        return NotCropped(
            "box_narrow",
            f"one side of the box is more than {sight.max_aspect:g} times the other: take a wider "
            "one",
        )
    return region


def in_pixels(box: Region, view: View, convention: BoxConvention) -> Region:
    """A box of the view's frame in its pixels."""
    across, down = _units(view, convention)
    x1, y1, x2, y2 = box
    return x1 * across, y1 * down, x2 * across, y2 * down


def in_frame(region: Region, view: View, convention: BoxConvention) -> Region:
    """A part of the page as a box of the view's frame, of which it may reach out."""
    across, down = _units(view, convention)
    left, top, right, bottom = view.region
    across *= (right - left) / view.width
    down *= (bottom - top) / view.height
    x1, y1, x2, y2 = region
    return (x1 - left) / across, (y1 - top) / down, (x2 - left) / across, (y2 - top) / down


def _units(view: View, convention: BoxConvention) -> tuple[float, float]:
    """Pixels of the view that 1 stands for, across and down."""
    if convention == "pixel":
        return 1.0, 1.0
    parts = 1000 if convention == "thousand" else 1
    return view.width / parts, view.height / parts


def _shown(
    kind: Literal["page", "crop"],
    page_id: str,
    picture: PILImage,
    region: Region,
    sight: SightConfig,
) -> Shown:
    from PIL import Image

    left, top, right, bottom = region
    size = shown_size(int(right - left), int(bottom - top), sight)
    png = write_png(picture.resize(size, Image.Resampling.BICUBIC, box=region))
    view = View(
        kind=kind,
        page_id=page_id,
        width=size[0],
        height=size[1],
        region=region,
        page_width=picture.width,
        page_height=picture.height,
        image=picture_hash(png),
    )
    return Shown(view, png)
