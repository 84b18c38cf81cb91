"""Vision models of published sizes: their weights are counted, and small ones are read by a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench.vision_model.folder import model_config, write_model
from bench.vision_model.phases import Phases
from bench.vision_model.sizes import MODELS, sizes_of, smaller
from scorekit.errors import UserError
from trainer.rl.policy import load_policy, without_weights
from trainer.search.config import SearchConfig
from trainer.search.images.image_data import displayed_size, write_png
from trainer.search.images.views import ShownImage
from trainer.search.records import ImageView
from trainer.search.rollout.sampled import inspect_policy

#: Weights of the published files.
PUBLISHED = {
    "Qwen3-VL-2B": 2_127_532_032,
    "Qwen3-VL-4B": 4_437_815_808,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_weights_as_the_published_one(name: str) -> None:
    model = without_weights(model_config(MODELS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Qwen3-VL-2B", "Qwen2.5-VL-3B"])
def test_a_run_reads_the_folder_and_sees_a_picture(name: str, tmp_path: Path) -> None:
    sizes = smaller(MODELS[name], 128, 1)
    write_model(sizes, tmp_path / "model", dtype="float32")
    cfg = SearchConfig.model_validate(
        {
            "policy": {"path": str(tmp_path / "model")},
            "episode": {"observation": "image", "sight": {"factor": sizes.factor}},
        }
    )
    inputs = inspect_policy(cfg)
    assert inputs.reader is not None
    width, height = displayed_size(1920, 1080, cfg.episode.sight)
    view = ImageView(
        kind="page",
        page_id="deck_1",
        width=width,
        height=height,
        region=(0, 0, width, height),
        page_width=width,
        page_height=height,
        image="",
    )
    image = ShownImage(view, write_png(Image.new("RGB", (width, height), "white")))
    seen = inputs.reader.read(image)
    num_ids = inputs.reader.ids(image)
    model, tokenizer = load_policy(cfg.policy, torch.device("cpu"))
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    ids = torch.tensor([[start, *[inputs.reader.image_id] * num_ids, end]])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == inputs.reader.image_id).long(),
            pixel_values=seen.patches,
            image_grid_thw=torch.tensor([seen.grid]),
            logits_to_keep=1,
        ).logits
    assert logits.shape == (1, 1, sizes.text["vocab_size"])
    assert logits.isfinite().all()


def test_another_name_is_refused() -> None:
    with pytest.raises(UserError, match="Qwen9: no such model"):
        sizes_of("Qwen9")


def test_a_command_that_takes_too_long_is_ended_and_written_down(tmp_path: Path) -> None:
    phases = Phases(tmp_path)
    phase = phases.run("slow", "http.server", "0", "--bind", "127.0.0.1", limit_s=0.1)
    failed = phases.run("wrong", "json.tool", str(tmp_path / "missing"), limit_s=60.0)
    rows = json.loads((tmp_path / "phases.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == ["slow", "wrong"]
    assert phase.details == {"ended_after_s": 0.1} and phase.exit_code
    assert failed.exit_code and not failed.details
