"""Check image files as pages."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from services.retriever.index.images import UnreadableImage, read_image


def file_of(image, kind="png", **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def levels(image):
    return sorted(set(image.getdata()))


def test_a_scan_of_16_bits_keeps_its_greys():
    rows = np.array([[0, 3000, 30_000, 65_535]] * 3, dtype=np.uint16)
    read = read_image(file_of(Image.fromarray(rows)), 10**6)
    assert levels(read) == [(g, g, g) for g in (0, 11, 117, 255)]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_other_kinds_of_picture_are_what_they_show(mode):
    original = Image.new("RGB", (4, 2), "white")
    original.putpixel((1, 1), (0, 0, 0))
    read = read_image(file_of(original.convert(mode)), 10**6)
    assert read.mode == "RGB" and read.tobytes() == original.tobytes()


def test_what_is_transparent_is_white():
    assert levels(read_image(file_of(Image.new("RGBA", (3, 3))), 10**6)) == [(255, 255, 255)]


def test_a_small_file_of_many_pixels_is_not_decoded():
    with pytest.raises(UnreadableImage, match="too many pixels"):
        read_image(file_of(Image.new("1", (9000, 9000))), 10**6)
