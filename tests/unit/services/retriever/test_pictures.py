"""Check image files as pages."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from scorekit.images import UnreadableImage
from services.retriever.index.images import ImageRequest, png_of, read_image, sha256
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageContent
from services.retriever.routes import AT_ONCE, PageRoutes


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


async def read_while_parts_wait(paths, page):
    routes = PageRoutes(paths)
    for _ in range(AT_ONCE):
        await routes._slots.acquire()
    return await routes._body(page, ImageRequest())


def test_a_whole_picture_does_not_wait_for_parts_of_others(tmp_path):
    png = png_of(Image.new("RGB", (4, 3)))
    paths = IndexPaths(tmp_path, tmp_path, tmp_path)
    (path := paths.image_path(sha256(png))).parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    content = PageContent(width=4, height=3, picture=sha256(png))
    assert asyncio.run(asyncio.wait_for(read_while_parts_wait(paths, content), 60)) == png
