"""Check frames: boxes in a crop of a crop are mapped back to the page."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainer.search.config import SightConfig
from trainer.search.images.image_data import ImageError, image_hash, read_image
from trainer.search.images.views import (
    CropFailure,
    ShownImage,
    crop_region,
    crop_view,
    in_frame,
    in_pixels,
    page_view,
    page_within,
)
from trainer.search.records import ImageView

BARE = SightConfig(crop_padding=0)


def gradient(width: int = 1280, height: int = 720) -> bytes:
    """Return an image whose red value is the horizontal and green the vertical position."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return as_bytes(Image.fromarray(pixels))


def as_bytes(image: Image.Image, form: str = "PNG") -> bytes:
    written = BytesIO()
    image.save(written, form)
    return written.getvalue()


def middle(png: bytes) -> tuple[float, float]:
    """Return the position of an image's center on the gradient, as fractions of the page."""
    image = read_image(png)
    red, green, _ = image.getpixel((image.width // 2, image.height // 2))
    return red / 255, green / 255


def test_a_crop_of_a_crop_shows_what_was_asked_for() -> None:
    """Check nested crops. The public original used the last image's size and the page's pixels."""
    page = page_view("deck_1", gradient(), BARE)
    first = crop_view(page.view, (400, 200, 800, 400), gradient(), BARE)
    assert isinstance(first, ShownImage)
    wide, high = first.view.width, first.view.height
    second = crop_view(first.view, (wide / 2, high / 2, wide, high), gradient(), BARE)
    assert isinstance(second, ShownImage)
    # the lower right quarter of [400, 800] x [200, 400] in a frame of the page's size
    expected = 700 / page.view.width, 350 / page.view.height
    assert middle(second.png) == pytest.approx(expected, abs=0.01)
    left, top, right, bottom = second.view.region
    assert (left + right) / 2 / 1280 == pytest.approx(expected[0], abs=0.002)
    assert (top + bottom) / 2 / 720 == pytest.approx(expected[1], abs=0.003)


def test_a_page_shown_again_is_the_frame_again() -> None:
    page = page_view("deck_1", gradient(), BARE)
    repeated = page_view("deck_1", gradient(), BARE)
    assert repeated.view == page.view and repeated.png == page.png
    assert image_hash(page.png) == page.view.image


@pytest.mark.parametrize(
    ("convention", "box"),
    [
        ("pixel", (400, 200, 800, 400)),
        ("thousand", (400 / 0.840, 200 / 0.448, 800 / 0.840, 400 / 0.448)),
        ("unit", (400 / 840, 200 / 448, 800 / 840, 400 / 448)),
    ],
)
def test_a_box_means_the_same_in_each_convention(convention, box) -> None:
    sight = SightConfig(crop_padding=0, box_convention=convention)
    view = page_view("deck_1", gradient(), sight).view
    assert (view.width, view.height) == (840, 448)
    assert in_pixels(box, view, convention) == pytest.approx((400, 200, 800, 400))
    assert crop_region(view, box, sight) == crop_region(view, (400, 200, 800, 400), BARE)


def test_boxes_in_pixels_of_the_page_do_not_pass_for_boxes_of_the_frame() -> None:
    """Check boxes like half of those in the original's cold-start data."""
    view = page_view("deck_1", gradient(), BARE).view
    refused = crop_region(view, (600, 100, 1000, 300), BARE)
    assert isinstance(refused, CropFailure) and refused.reason == "box_outside"


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((300, 100, 300, 200), "box_order"),
        ((300, 100, 200, 200), "box_order"),
        ((300, 200, 400, 100), "box_order"),
        ((-1, 0, 100, 100), "box_outside"),
        ((0, 0, 840, 449), "box_outside"),
        ((0, 0, 841, 448), "box_outside"),
        ((10, 10, 12, 200), "box_small"),
        ((10, 10, 10.5, 10.5), "box_small"),
    ],
)
def test_what_cannot_be_cut_out_is_told(box, reason) -> None:
    view = page_view("deck_1", gradient(), BARE).view
    refused = crop_view(view, box, gradient(), BARE)
    assert isinstance(refused, CropFailure) and refused.reason == reason and refused.detail


def test_a_sliver_is_not_stretched() -> None:
    sight = SightConfig(crop_padding=0, min_crop=1)
    view = page_view("deck_1", gradient(), sight).view
    refused = crop_view(view, (10, 10, 12, 400), gradient(), sight)
    assert isinstance(refused, CropFailure) and refused.reason == "box_narrow"


def test_padding_is_in_pixels_as_shown_and_ends_at_the_page() -> None:
    view = page_view("deck_1", gradient(), SightConfig()).view
    across, down = 1280 / 840, 720 / 448
    region = crop_region(view, (100, 0, 200, 100), SightConfig(crop_padding=28))
    assert region == pytest.approx((72 * across, 0, 228 * across, 128 * down), abs=1)
    # a line of small print, too low without padding
    assert isinstance(crop_region(view, (10, 400, 300, 408), BARE), CropFailure)
    assert not isinstance(crop_region(view, (10, 400, 300, 408), SightConfig()), CropFailure)


sides = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@given(sides, sides, st.sampled_from(["pixel", "thousand", "unit"]), st.integers(0, 40))
def test_every_region_lies_in_the_page_and_holds_its_box(across, down, convention, padding) -> None:
    sight = SightConfig(crop_padding=padding, box_convention=convention)
    view = ImageView(
        kind="crop",
        page_id="p",
        width=560,
        height=392,
        region=(100, 50, 480, 310),
        page_width=1000,
        page_height=700,
        image="",
    )
    full_size = {"pixel": (560, 392), "thousand": (1000, 1000), "unit": (1, 1)}[convention]
    box = (
        across[0] * full_size[0],
        down[0] * full_size[1],
        across[1] * full_size[0],
        down[1] * full_size[1],
    )
    region = crop_region(view, box, sight)
    if isinstance(region, CropFailure):
        return
    left, top, right, bottom = region
    assert 0 <= left < right <= 1000 and 0 <= top < bottom <= 700
    assert all(side == int(side) for side in region)
    back = in_frame(region, view, convention)
    slack = 1e-9 * full_size[0]
    assert back[0] <= box[0] + slack and back[1] <= box[1] + slack
    assert back[2] >= box[2] - slack and back[3] >= box[3] - slack


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "I;16", "CMYK"])
def test_pictures_of_all_kinds_are_read(mode) -> None:
    image = Image.new("RGB", (64, 48), (200, 0, 0)).convert("L" if mode == "I;16" else mode)
    data = as_bytes(image.convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    assert read_image(data).mode == "RGB" and read_image(data).size == (64, 48)


def test_what_is_transparent_is_white() -> None:
    assert read_image(as_bytes(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))).getpixel((0, 0)) == (
        255,
        255,
        255,
    )


def test_a_picture_that_is_none_has_an_error_of_its_own() -> None:
    png = gradient()
    for data in (b"", b"<html>", png[: len(png) // 2]):
        with pytest.raises(ImageError):
            page_view("deck_1", data, BARE)
    view = page_view("deck_1", png, BARE).view
    with pytest.raises(ImageError, match="changed its size"):
        crop_view(view, (100, 100, 400, 300), gradient(640, 360), BARE)
    with pytest.raises(ImageError, match="too long"):
        page_view("deck_1", gradient(2000, 30), BARE)


def noise(width: int = 1280, height: int = 720) -> bytes:
    """Return an image that no smaller one can show."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return as_bytes(Image.fromarray(pixels))


def test_originals_have_the_pixels_of_the_page_which_the_policy_was_not_shown() -> None:
    page_pixels = np.asarray(read_image(noise()))
    page = page_view("deck_1", noise(), BARE, 1280 * 720)
    crop = crop_view(page.view, (0, 0, 840, 400), noise(), BARE, 1280 * 720)
    assert isinstance(crop, ShownImage)
    for view in (page, crop):
        assert view.original is not None and image_hash(view.original) == view.view.original
        left, top, right, bottom = map(int, view.view.region)
        original = np.asarray(read_image(view.original))
        assert np.array_equal(original, page_pixels[top:bottom, left:right])
        assert read_image(view.png).width < right - left
    assert page.view.image == page_view("deck_1", noise(), BARE).view.image


def test_an_original_stays_within_its_budget_and_below_that_of_the_policy_is_the_shown_one() -> (
    None
):
    page = page_view("deck_1", noise(), BARE, 600_000)
    assert page.original is not None
    width, height = read_image(page.original).size
    assert 590_000 < width * height <= 600_000
    assert width / height == pytest.approx(1280 / 720, rel=0.002)
    small = crop_view(page.view, (100, 100, 300, 200), noise(), BARE, 600_000)  # was enlarged
    assert isinstance(small, ShownImage)
    for view in (small, page_view("deck_1", noise(), BARE, 1000)):
        assert view.original is None and view.view.original == view.view.image
    assert page_view("deck_1", noise(), BARE).view.original is None


def test_a_page_within_the_budget_is_sent_as_the_file_that_it_is() -> None:
    assert page_within(noise(), 1280 * 720) == noise()
    width, height = read_image(page_within(noise(), 400_000)).size
    assert 390_000 < width * height <= 400_000
