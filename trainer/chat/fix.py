"""A mended template, and a mended generation_config, written beside the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.chat.boundaries import mended
from trainer.chat.config import ChatConfig
from trainer.chat.labelling import Learned
from trainer.chat.markers import MarkedTemplate
from trainer.chat.render import Turns, own_template, read_template


def fixed_template(
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    *,
    learned: Learned = "all",
) -> tuple[MarkedTemplate, str]:
    """A template with markers that renders what the model's own does (where it has none: the
    config's), and the diff from the template that training would use now."""
    given = read_template(chat.template) if chat.template else None
    base = own_template(tokenizer) or given
    if base is None:
        raise UserError("there is no chat template to mend: name one with --template")
    made = mended(tokenizer, conversations, chat, base, learned=learned)
    before = (given or base).splitlines()
    lines = unified_diff(before, made.template.splitlines(), "before", "after", lineterm="", n=1)
    return made, "\n".join(lines)


def fixed_generation_config(folder: Path, ids: Sequence[int]) -> str:
    """The folder's generation_config.json, in which sampling also ends at `ids`."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = config.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    config["eos_token_id"] = [*ends, *(i for i in ids if i not in ends)]
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"


def write_beside(path: Path, text: str) -> None:
    """Write a new file. Raises UserError if another text stands there."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path} exists and is not replaced; name another (--to), or remove it")
    write_atomic(path, text)
