"""A tiny policy that reads images, as a folder that both the trainer and a vLLM server can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kits.trainer.images import PROCESSOR, tiny
from tests.kits.trainer.searching.policies import tiny_tokenizer
from trainer.rl.model_files import save_tokenizer

#: Kind -> the names of model, processor, and processor of videos, without which vLLM reads none.
_CLASSES = {
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VL"),
    "qwen3_vl": ("Qwen3VL", "Qwen3VL"),
}
#: Ids that it reads: a token is a letter.
ROOM = 8192


def seeing(kind: str) -> Any:
    """Return a random vision model.

    vLLM's attention on a CPU has no heads of 16, and with larger weights float32 rounds a log-
    probability by more than 1e-5.
    """
    return tiny(kind, head=32, max_positions=ROOM, spread=0.05).float()


def save_seeing(folder: Path, kind: str, model: Any) -> Path:
    """Write a model of `seeing` as a folder."""
    processor, videos = _CLASSES[kind]
    model.save_pretrained(folder)
    save_tokenizer(tiny_tokenizer(), folder)
    PROCESSOR.save_pretrained(folder)
    sizes = json.loads((folder / "preprocessor_config.json").read_text())
    shared_keys = ("patch_size", "merge_size", "temporal_patch_size", "size")
    video = {key: sizes[key] for key in shared_keys if key in sizes}
    video["video_processor_type"] = f"{videos}VideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    named = {"processor_class": f"{processor}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(named))
    return folder
