"""Check that any content of `images` is a valid image or fails its sample."""

from __future__ import annotations

import contextlib
import io
from base64 import b64encode

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scorekit.errors import SampleError
from services.judge.fence import image_parts


def _intact_image(kind: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(data, kind)
    return data.getvalue()


INTACT_IMAGES = [_intact_image(kind) for kind in ("PNG", "JPEG", "WEBP")]
HEADS = [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff\xe0", b"RIFF\x10\0\0\0WEBPVP8 ", b""]


@given(st.sampled_from(HEADS), st.binary(max_size=200))
def test_bytes_of_any_kind_fail_as_a_sample_does(head, tail):
    with contextlib.suppress(SampleError):
        image_parts([b64encode(head + tail).decode()])


@given(
    st.sampled_from(INTACT_IMAGES), st.integers(0, 400), st.integers(0, 255), st.integers(0, 400)
)
def test_damaged_pictures_do_too(data, position, byte, end):
    damaged = bytearray(data)
    damaged[position % len(data)] = byte
    with contextlib.suppress(SampleError):
        image_parts([b64encode(bytes(damaged[: max(1, end)])).decode()])


@given(st.text(max_size=50))
def test_texts_do_too(text):
    with contextlib.suppress(SampleError):
        image_parts([text])
