"""Compare displayed image sizes with the processors, which must not resize them."""

from __future__ import annotations

import random
import sys

import pytest
from pydantic import ValidationError
from transformers import Qwen2VLImageProcessor

from trainer.search.config import SightConfig
from trainer.search.images.image_data import displayed_size

#: Of the backend in the installed transformers.
smart_resize = sys.modules[type(Qwen2VLImageProcessor()).__module__].smart_resize


@pytest.mark.parametrize("factor", [28, 32])
@pytest.mark.parametrize(("min_pixels", "max_pixels"), [(200_704, 401_408), (3_136, 1_003_520)])
def test_sizes_are_those_of_qwens_processor_which_leaves_them_so(
    factor, min_pixels, max_pixels
) -> None:
    sight = SightConfig(factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    dice = random.Random(0)
    for _ in range(2000):
        width = dice.randint(28, 4096)
        height = dice.randint(max(28, -(-width // 50)), min(4096, width * 50))
        size = displayed_size(width, height, sight)
        assert smart_resize(height, width, factor, min_pixels, max_pixels) == size[::-1]
        assert smart_resize(size[1], size[0], factor, min_pixels, max_pixels) == size[::-1]
        assert size[0] * size[1] <= max_pixels


def test_a_model_of_any_size_keeps_the_aspect() -> None:
    sight = SightConfig(factor=1)
    assert displayed_size(800, 450, sight) == (800, 450)
    width, height = displayed_size(1280, 720, sight)
    assert 0.99 * 401_408 < width * height <= 401_408
    assert width / height == pytest.approx(16 / 9, rel=0.01)


def test_limits_that_no_size_can_keep_are_refused() -> None:
    with pytest.raises(ValidationError, match="twice min_pixels"):
        SightConfig(min_pixels=300_000)
