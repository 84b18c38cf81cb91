"""What transformers 4.57 and 5 write so that the other misreads it, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scorekit.errors import UserError


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that both read the same from it.

    Each names classes that the other lacks (`TokenizersBackend`) or builds otherwise (`Llama`'s
    splits leading spaces differently). The plain class takes tokenizer.json as it is, in both.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not tokenizer.is_fast or "auto_map" in config:  # code of its own reads it
        return
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # 4.57 knows the list by this name
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load_config(path: str, revision: str | None = None) -> Any:
    """A model's config. 5 writes the rotary settings under `rope_parameters`, where 4.57 does not
    look: it would take its defaults for them, and another model would run.

    Raises UserError where 4.57 cannot say what 5 wrote.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, revision=revision)
    written = getattr(config, "rope_parameters", None)
    if written is None or not hasattr(config, "rope_theta"):  # none, or this is 5
        return config
    if "rope_theta" not in written or "partial_rotary_factor" in written:
        raise UserError(
            f"{path}: saved by transformers 5 with rotary settings that 4.57 has no words for: "
            "load it under transformers 5"
        )
    config.rope_theta = written["rope_theta"]
    if written.get("rope_type", "default") != "default":
        config.rope_scaling = {key: written[key] for key in written if key != "rope_theta"}
    del config.rope_parameters
    return config
