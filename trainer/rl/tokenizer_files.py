"""Loading and saving a tokenizer exactly as its tokenizer.json defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_tokenizer(path: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a folder or of a hub id, padding on the left.

    The classes that transformers 5 has for Qwen2, Llama and others rebuild the tokenizer. They give
    some texts other ids than tokenizer.json does, with which the model was trained. The plain class
    takes the file as it is. Raises what transformers raises.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    options: dict[str, Any] = {"revision": revision, "padding_side": "left"}
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    is_transformers_class = type(tokenizer).__module__.startswith("transformers.")
    if not is_transformers_class or not tokenizer.is_fast:
        return tokenizer
    missing_is_none = {"_raise_exceptions_for_missing_entries": False}
    if cached_file(path, "tokenizer.json", revision=revision, **missing_is_none) is None:
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(path, **options)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that transformers 5 and 4 load it with the same ids.

    The plain class is named in it, see `read_tokenizer`. Further special tokens get the key of
    version 4, which version 5 reads as well.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "auto_map" in config:  # custom code reads it
        return
    if tokenizer.is_fast:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
