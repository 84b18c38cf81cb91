"""Saving a tokenizer so that it gives the same ids when it is loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that it gives the same ids when it is loaded again.

    transformers 5 builds a Llama tokenizer anew when it loads one, and then splits leading spaces
    otherwise than the one that was saved. The plain class takes tokenizer.json as it is.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not tokenizer.is_fast or "auto_map" in config:  # code of its own reads it
        return
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
