"""Write a repaired template and generation_config next to the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

from scorekit.documents import read_json
from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.chat.config import ChatConfig
from trainer.chat.labels import TrainedTurns
from trainer.chat.markers import MarkedTemplate
from trainer.chat.render import Turns, own_template, read_template
from trainer.chat.template_check import repaired_template


def fixed_template(
    tokenizer: Any, conversations: Sequence[Turns], chat: ChatConfig, trained_turns: TrainedTurns
) -> tuple[MarkedTemplate, str]:
    """Return a template with markers that renders the same text, and its diff.

    It is made from the model's own (else the config's); the diff is from that of training now.
    """
    configured = read_template(chat.template) if chat.template else None
    base = own_template(tokenizer) or configured
    if base is None:
        raise UserError("there is no chat template to repair. Name one with --template")
    repaired = repaired_template(tokenizer, conversations, chat, base, trained_turns=trained_turns)
    before = (configured or base).splitlines()
    lines = unified_diff(
        before, repaired.template.splitlines(), "before", "after", lineterm="", n=1
    )
    return repaired, "\n".join(lines)


def fixed_generation_config(folder: Path, ids: Sequence[int]) -> str:
    """Return the folder's generation_config.json, changed so that sampling also ends at `ids`."""
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    value = config.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    config["eos_token_id"] = [*ends, *(i for i in ids if i not in ends)]
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"


def write_beside(path: Path, text: str) -> None:
    """Write a new file. Raises UserError if it exists with other text."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path} exists and is not replaced. Name another (--to), or remove it")
    write_atomic(path, text)
