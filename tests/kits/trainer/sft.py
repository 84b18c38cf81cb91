"""Rows and tiny models for runs of SFT."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kits.trainer.chat import CHATML, byte_tokenizer, turns
from tests.kits.trainer.runs import tiny_llama
from trainer.rl.model_files import save_tokenizer
from trainer.sft.config import SftConfig

_ENDINGS = ("네 뷁", "그냥요 😀", '웃었다.\n"좋아."', "응", "안녕하세요")


def save_chat_model(
    folder: Path, template: str = CHATML, end: str = "<|im_end|>", **changes: Any
) -> Path:
    """Write a random Llama whose tokens are bytes, with a chat template.

    changes: of its config; `stops` are the ids that end sampling.
    """
    tokenizer = byte_tokenizer(template, end)
    stops = changes.pop("stops", tokenizer.eos_token_id)
    model: Any = tiny_llama(tokenizer, **({"max_position_embeddings": 512} | changes))
    model.generation_config.eos_token_id = stops
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def dialogues(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of two replies, of many lengths."""
    numbers = random.Random(seed)
    return [
        {
            "messages": turns(
                f"안녕 {n}",
                numbers.choice(_ENDINGS) * numbers.randint(1, 3),
                "왜?",
                numbers.choice(_ENDINGS),
                system="너는 지민이다.",
            )
        }
        for n in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def sft_config(model: Path, train: Path, run_dir: Path, **sections: Any) -> SftConfig:
    """Return the config of a short run on a CPU; `sections` override its values."""
    config: dict[str, Any] = {
        "data": {"train": str(train)},
        "policy": {"path": str(model)},
        "sft": {"per_device_train_batch_size": 4, "learning_rate": 1e-2},
        "misc": {"device": "cpu", "threads": 1, "run_dir": str(run_dir)},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return SftConfig.model_validate(config)
