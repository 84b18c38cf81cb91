"""Check that an image file is decoded to what a person sees in it."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from scorekit.images import UnreadableImage, count_frames, read_rgb, shows_its_pixels

RED, WHITE, BLACK = (255, 0, 0), (255, 255, 255), (0, 0, 0)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def corner() -> Image.Image:
    """Return an upright image whose four corners differ."""
    image = Image.new("RGB", (3, 2), "white")
    for position, color in (((0, 0), RED), ((2, 0), (0, 255, 0)), ((0, 1), (0, 0, 255))):
        image.putpixel(position, color)
    return image


#: EXIF orientation -> how a camera stores an upright image with it.
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_an_image_is_rotated_once_as_its_exif_says(orientation, kind, options):
    exif = Image.Exif()
    exif[0x112] = orientation
    data = file_of(corner().transpose(STORED[orientation]), kind, exif=exif, **options)
    read = read_rgb(data)
    assert read.size == (3, 2) and read.tobytes() == corner().tobytes()
    if kind != "TIFF":
        with Image.open(io.BytesIO(data)) as opened:
            assert not shows_its_pixels(opened)


def test_a_photo_is_rotated_as_its_exif_says():
    exif = Image.Exif()
    exif[0x112] = 6
    upright = Image.new("RGB", (32, 16), "white")
    upright.paste(RED, (0, 0, 16, 16))
    read = read_rgb(file_of(upright.transpose(STORED[6]), "JPEG", exif=exif, quality=95))
    assert read.size == (32, 16)
    assert read.getpixel((4, 8))[1] < 60 and read.getpixel((28, 8))[1] > 200


def transparent_images() -> dict[str, bytes]:
    """Return files of an image: left transparent (and black below), right half red."""
    rgba = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    rgba.putpixel((1, 0), (*RED, 128))
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, *RED])
    palette.putpixel((1, 0), 1)
    gray = Image.new("LA", (2, 1), (0, 0))
    gray.putpixel((1, 0), (0, 128))
    return {
        "RGBA": file_of(rgba),
        "RGBA of WebP": file_of(rgba, "WEBP", lossless=True, exact=True),
        "palette": file_of(palette, transparency=bytes([0, 128])),
        "palette of GIF": file_of(palette, "GIF", transparency=0),
        "LA": file_of(gray),
        "RGBA of TIFF": file_of(rgba, "TIFF"),
    }


@pytest.mark.parametrize("name", transparent_images())
def test_what_is_transparent_is_as_on_white_paper(name):
    data = transparent_images()[name]
    read = read_rgb(data)
    left, right = (read.getpixel((x, 0)) for x in (0, 1))
    assert left == WHITE
    assert right == {"palette of GIF": RED, "LA": (127, 127, 127)}.get(name, (255, 127, 127))
    with Image.open(io.BytesIO(data)) as opened:
        assert not shows_its_pixels(opened)


def test_the_transparent_gray_of_a_png_is_white():
    image = Image.new("L", (2, 1), 7)
    image.putpixel((1, 0), 90)
    assert read_rgb(file_of(image, transparency=7)).tobytes() == bytes([255] * 3 + [90] * 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_keep_their_grays(kind):
    levels = np.array([[0, 3000, 30_000, 65_535]], dtype=np.uint16)
    data = file_of(Image.fromarray(levels), kind)
    assert [p[0] for p in np.asarray(read_rgb(data))[0]] == [0, 11, 117, 255]
    with Image.open(io.BytesIO(data)) as opened:
        assert not shows_its_pixels(opened)


@pytest.mark.parametrize(
    ("levels", "grays"),
    [
        (np.array([[0, 3000, 65_535]], np.int32), [0, 11, 255]),
        (np.array([[0, 2**20, 2**21]], np.int32), [0, 128, 255]),
        (np.array([[-100, 0, 100]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 500, 1000]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, np.inf, 1]], np.float32), [0, 0, 255]),
        (np.zeros((1, 3), np.float32), [0, 0, 0]),
    ],
)
def test_values_of_32_bits_are_gray_levels(levels, grays):
    read = np.asarray(read_rgb(file_of(Image.fromarray(levels), "TIFF")))
    assert read[0, :, 0].tolist() == pytest.approx(grays, abs=1)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("has_profile", [False, True])
def test_ink_of_four_colors_is_what_it_prints(kind, has_profile):
    """Check also that the inverted values of Adobe's JPEG are turned back, and a profile is
    allowed."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    options = {"icc_profile": profile} if has_profile else {}
    for ink, color in (((0, 255, 255, 0), RED), ((0, 0, 0, 0), WHITE), ((0, 0, 0, 255), BLACK)):
        read = read_rgb(file_of(Image.new("CMYK", (8, 8), ink), kind, **options))
        assert read.getpixel((4, 4)) == pytest.approx(color, abs=2)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(
            (mode, kind)
            for mode in ("1", "L", "P", "RGB")
            for kind in ("PNG", "GIF", "BMP", "TIFF")
        ),
        ("YCbCr", "TIFF"),
        ("LAB", "TIFF"),
    ],
)
def test_other_kinds_show_the_same(mode, kind):
    original = Image.new("RGB", (4, 2), "white")
    original.putpixel((1, 1), BLACK)
    image = original.convert(mode)
    assert np.asarray(read_rgb(file_of(image, kind))) == pytest.approx(np.asarray(original), abs=2)


def test_the_transparent_color_of_16_bits_is_white():
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    def png(color_type: int, clear: tuple[int, ...], *pixels: tuple[int, ...]) -> bytes:
        header = struct.pack(">IIBBBBB", len(pixels), 1, 16, color_type, 0, 0, 0)
        words = [value for pixel in pixels for value in pixel]
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear))
            + chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(f">{len(words)}H", *words)))
            + chunk(b"IEND", b"")
        )

    gray = read_rgb(png(0, (1000,), (40_000,), (1000,)))
    assert [gray.getpixel((x, 0)) for x in (0, 1)] == [(156, 156, 156), WHITE]
    color = read_rgb(png(2, (40_000, 1000, 9), (40_000, 1000, 9), (1000, 40_000, 0)))
    assert [color.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (3, 156, 0)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("level", [np.float32(5), np.float32(-5), np.int32(100_000)])
def test_an_image_of_one_level_without_a_known_white_is_white(level):
    assert (
        read_rgb(file_of(Image.fromarray(np.full((2, 2), level)), "TIFF")).getpixel((0, 0)) == WHITE
    )


def test_of_an_animation_the_first_frame_is_read():
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 0, 255))]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert read_rgb(data).getpixel((0, 0)) == RED
        assert count_frames(data) == (2, kind)


def test_each_page_of_a_tiff_is_read():
    pages = [Image.new("RGB", size, color) for size, color in (((4, 4), RED), ((6, 2), BLACK))]
    data = file_of(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert count_frames(data) == (2, "TIFF")
    assert [read_rgb(data, frame=k).getpixel((0, 0)) for k in (0, 1)] == [RED, BLACK]
    assert read_rgb(data, frame=1).size == (6, 2)
    with pytest.raises(UnreadableImage, match="cannot be decoded"):
        read_rgb(data, frame=2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_that_is_cut_off_is_refused_with_a_reason(kind):
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    data = file_of(noise, kind)
    assert read_rgb(data).size == (64, 64)
    for part in (0.0, 0.01, 0.5, 0.9):
        with pytest.raises(UnreadableImage, match=r"decoded|not a|pixels"):
            read_rgb(data[: int(part * len(data))])


def test_a_small_file_that_declares_many_pixels_is_not_decoded():
    with pytest.raises(UnreadableImage, match="too many pixels"):
        read_rgb(file_of(Image.new("1", (200, 200))), max_pixels=39_999)
    small = bytearray(file_of(Image.new("L", (2, 2))))
    small[16:24] = struct.pack(">II", 60_000, 60_000)
    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    with pytest.raises(UnreadableImage, match="too many pixels"):
        read_rgb(bytes(small))
    bomb = file_of(Image.new("1", (20_000, 7000)), "TIFF", compression="group4")
    assert len(bomb) < 20_000
    with pytest.raises(UnreadableImage, match="too many pixels"):
        read_rgb(bomb)


def test_only_the_named_formats_are_read():
    portable = file_of(corner(), "PPM")
    with pytest.raises(UnreadableImage, match="not a PNG, JPEG, WebP, GIF, BMP or TIFF image"):
        read_rgb(portable)
    assert read_rgb(portable, formats=None).tobytes() == corner().tobytes()
    with pytest.raises(UnreadableImage, match="not an image"):
        read_rgb(b"words", formats=None)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "RGBA"])
def test_an_opaque_image_needs_no_conversion(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    with Image.open(io.BytesIO(file_of(corner().convert(mode), kind))) as opened:
        assert shows_its_pixels(opened)
