"""Write a vision model of published sizes with random weights, as a folder that a run can train."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

from bench.common import ROOT
from bench.vision_model.sizes import END_OF_TEXT, END_OF_TURN, IDS, Sizes

#: Qwen3's tokenizer, which Qwen3-VL has, too. Qwen2.5-VL's has the same vocabulary without
#: <think> and </think> as tokens of their own.
TOKENIZER = ROOT / "tests/data/tokenizers/qwen3"


def model_config(sizes: Sizes) -> Any:
    """Return the config of transformers for a model of these sizes."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        sizes.kind,
        text_config=dict(sizes.text) | {"eos_token_id": END_OF_TURN, "bos_token_id": END_OF_TEXT},
        vision_config=dict(sizes.vision),
        tie_word_embeddings=sizes.text["tie_word_embeddings"],
        **IDS,
    )


def write_model(
    sizes: Sizes, folder: Path, *, seed: int = 1, dtype: str = "bfloat16", device: str = "cpu"
) -> int:
    """Write weights, config, tokenizer, chat template and image processor; return the number of
    weights.

    Weights are drawn as transformers initializes the architecture.
    device: where they are drawn.
    """
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForImageTextToText.from_config(
            model_config(sizes), dtype=getattr(torch, dtype)
        )
    model.generation_config = GenerationConfig(
        eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    write_inputs(sizes, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_config(sizes: Sizes, folder: Path) -> None:
    """Write everything except the weights: enough for `trainer check`, which loads none."""
    folder.mkdir(parents=True, exist_ok=True)
    model_config(sizes).save_pretrained(folder)
    write_inputs(sizes, folder)


def write_inputs(sizes: Sizes, folder: Path) -> None:
    """Write tokenizer, chat template and image processor."""
    import trl

    shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
    packed = (TOKENIZER / "tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    templates = Path(trl.__file__).parent / "chat_templates"
    shutil.copy(templates / f"{sizes.template}.jinja", folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("chat_template", None)  # the file beside it holds the template
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
    min_pixels, max_pixels = sizes.pixels
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": sizes.vision["patch_size"],
        "merge_size": sizes.vision["spatial_merge_size"],
        "temporal_patch_size": sizes.vision["temporal_patch_size"],
        "image_mean": sizes.mean,
        "image_std": sizes.std,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
