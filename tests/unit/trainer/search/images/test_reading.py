"""Check how a vision policy processes an image with the settings in its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants as hub_constants
from transformers import Qwen2VLImageProcessor
from transformers.utils import hub as transformers_hub

from scorekit.errors import UserError
from tests.kits.trainer.images import PROCESSOR, tiny
from tests.kits.trainer.searching.pages import PagesHere
from tests.kits.trainer.searching.policies import TINY_SIGHT
from trainer.search.config import SightConfig
from trainer.search.images.image_data import ImageError, read_image
from trainer.search.images.processor import ImageProcessor, ProcessedImage, load_reader
from trainer.search.images.views import page_view

VISION_CONFIG = SimpleNamespace(
    model_type="qwen2_5_vl",
    vision_config=object(),
    image_token_id=1,
    video_token_id=2,
    vision_start_token_id=3,
    vision_end_token_id=4,
)


def test_a_page_is_480_ids_for_a_7b_qwen() -> None:
    processor = Qwen2VLImageProcessor(patch_size=14, merge_size=2, max_pixels=12_845_056)
    reader = ImageProcessor(processor, VISION_CONFIG, SightConfig())
    page = page_view("deck_1", PagesHere().image("deck_1"), SightConfig())
    assert (page.view.width, page.view.height, reader.ids(page)) == (840, 448, 480)
    assert reader.banned_token_ids == [1, 2, 3, 4]


def test_a_folders_own_processor_leaves_pictures_as_they_are(tmp_path: Path) -> None:
    model: Any = tiny("qwen2_5_vl")
    PROCESSOR.save_pretrained(tmp_path)
    sight = SightConfig.model_validate(TINY_SIGHT)
    reader = load_reader(str(tmp_path), model.config, sight)
    assert reader is not None
    page = page_view("deck_1", PagesHere().image("deck_1"), sight)
    seen = reader.read(page)
    assert seen.grid == (1, page.view.height // 4, page.view.width // 4)
    expected = PROCESSOR(images=[read_image(PagesHere().image("deck_1"))], return_tensors="pt")
    # resized by us or by the processor: the same pixels and patches
    assert torch.allclose(seen.patches, expected["pixel_values"], atol=1e-6)
    assert reader.ids(page) * 4 == len(seen.patches)


def test_a_picture_of_another_size_is_no_frame() -> None:
    reader = ImageProcessor(PROCESSOR, VISION_CONFIG, SightConfig.model_validate(TINY_SIGHT))
    with pytest.raises(ImageError, match="resized"):
        _ = ProcessedImage(PagesHere().image("deck_1"), (1, 90, 160), reader).patches


def test_a_policy_without_eyes_or_without_a_processor(tmp_path: Path) -> None:
    assert load_reader(str(tmp_path), SimpleNamespace(model_type="llama"), SightConfig()) is None
    with pytest.raises(UserError, match="its image processor"):
        load_reader(str(tmp_path), VISION_CONFIG, SightConfig())


def test_the_processor_is_that_of_the_policys_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two revisions in a hub cache, of which only `tuned` has the configured sizes."""
    other = Qwen2VLImageProcessor(patch_size=14, merge_size=2, max_pixels=12_845_056)
    cache_dir = tmp_path / "models--some--policy"
    (cache_dir / "refs").mkdir(parents=True)
    for name, commit, processor in (("main", "0" * 40, other), ("tuned", "1" * 40, PROCESSOR)):
        (cache_dir / "refs" / name).write_text(commit)
        processor.save_pretrained(cache_dir / "snapshots" / commit)
    for owner, key in ((hub_constants, "HF_HUB_CACHE"), (transformers_hub, "TRANSFORMERS_CACHE")):
        monkeypatch.setattr(owner, key, str(tmp_path), raising=False)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    config: Any = tiny("qwen2_5_vl").config
    sight = SightConfig.model_validate(TINY_SIGHT)
    assert load_reader("some/policy", config, sight, "tuned") is not None
    with pytest.raises(UserError, match="sight"):
        load_reader("some/policy", config, sight)
