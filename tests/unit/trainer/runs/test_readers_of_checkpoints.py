"""Check that a checkpoint has all files besides the weights that a policy needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2VLImageProcessor

from tests.kits.trainer.images import tiny
from tests.kits.trainer.searching.policies import tiny_tokenizer
from trainer.rl.config import PolicyConfig
from trainer.rl.policy import with_adapters
from trainer.runs.checkpoints.checkpoint import save_processors

SIZES = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 64}


@pytest.mark.parametrize("adapted", [False, True])
def test_a_policy_that_sees_is_saved_with_its_image_processor(
    tmp_path: Path, adapted: bool
) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    model = tiny("qwen2_5_vl")
    Qwen2VLImageProcessor(**SIZES).save_pretrained(base)
    model.config.name_or_path = str(base)
    if adapted:
        model = with_adapters(
            model, PolicyConfig.model_validate({"lora": {"r": 2, "target_modules": ["q_proj"]}})
        )
    save_processors(model, tiny_tokenizer(), saved)
    assert (saved / "tokenizer.json").is_file()
    before = Qwen2VLImageProcessor.from_pretrained(base).to_dict()
    assert Qwen2VLImageProcessor.from_pretrained(saved).to_dict() == before


def test_one_that_has_none_is_saved_without(tmp_path: Path) -> None:
    model = tiny("qwen2_5_vl")
    model.config.name_or_path = str(tmp_path)
    save_processors(model, tiny_tokenizer(), tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").is_file()
    assert not (tmp_path / "saved/preprocessor_config.json").exists()
