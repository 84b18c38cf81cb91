"""The files of a model folder: its config, its tokenizer, and the headers of its weights.

A folder that we write loads in transformers 4 as in transformers 5, which writes names that version
4 ignores: version 4 would then take its defaults, and compute another model without an error.
Servers often have an older version than the trainer. A tokenizer is loaded and saved exactly as its
tokenizer.json defines it.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from pathlib import Path
from typing import Any

from scorekit.documents import parse_json
from scorekit.errors import UserError

log = logging.getLogger(__name__)

#: Layer types whose rotary positions have another base in version 4: model type -> type -> key.
_BASE_KEYS = {
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "gemma3n_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "olmo3": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
}
#: Names of version 4 for keys that have another in version 5: model type -> key -> older name.
_OLDER_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
}
#: Model types whose `rope_scaling` may have no other key in version 4 than these.
_SCALING_KEYS = dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor"))
#: Values of `rope_type` that version 4 writes as no `rope_scaling`.
_UNSCALED = ("default", "axial")
#: The limit of safetensors itself.
_LARGEST_HEADER = 100 * 2**20


def save_model(model: Any, folder: Path, **options: Any) -> None:
    """Write a model or its adapters with `save_pretrained`, and the keys of `add_older_keys`."""
    model.save_pretrained(folder, **options)
    add_older_keys(folder)


def add_older_keys(folder: Path) -> None:
    """Add to config.json what transformers 4 reads; nothing happens in a folder of adapters.

    If the installed transformers would then read another config, the file stays as it was, with a
    warning.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    from transformers import AutoConfig

    text = path.read_text(encoding="utf-8")
    before = AutoConfig.from_pretrained(folder).to_dict()
    extended = json.dumps(with_older_keys(json.loads(text)), indent=2, sort_keys=True)
    path.write_text(extended + "\n", encoding="utf-8")
    after = AutoConfig.from_pretrained(folder).to_dict()
    differing = _first_difference(before, after)
    if differing is not None:
        path.write_text(text, encoding="utf-8")
        log.warning(
            "%s is for transformers 5 only: with the keys of version 4 it would read another %s",
            path,
            differing,
        )


def with_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a config.json with the keys of transformers 4 beside those of 5.

    These are `torch_dtype` (dtype); `rope_theta`, `rope_scaling` and `partial_rotary_factor`
    (rope_parameters); `tie_word_embeddings` of nested text configs; and names that a model had.
    """
    extended = {
        key: with_older_keys(value)
        if isinstance(value, dict) and key.endswith("_config")
        else value
        for key, value in config.items()
    }
    if isinstance(config.get("dtype"), str):
        extended["torch_dtype"] = config["dtype"]
    if config.get("rope_parameters"):
        extended |= _older_rope_keys(config)
    if "tie_word_embeddings" in config and isinstance(config.get("text_config"), dict):
        extended["text_config"].setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    names = _OLDER_NAMES.get(config.get("model_type", ""), {})
    return extended | {old: extended[new] for new, old in names.items() if new in extended}


def _older_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys for a config's `rope_parameters`; none if version 4 has none for them."""
    model_type, parameters = config.get("model_type", ""), config["rope_parameters"]
    base_keys = _BASE_KEYS.get(model_type, {})
    by_type = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    if by_type and not base_keys:
        if len({str(layer_parameters) for layer_parameters in by_type.values()}) > 1:
            log.warning(
                "%s: transformers 4 has no key that is known here for rotary positions by type of "
                "layer, and may compute another model. Load this folder by version 5.",
                model_type,
            )
        return {}
    by_type = by_type or {"full_attention": parameters}
    keys = {
        base_keys.get(layer_type, "rope_theta"): layer_parameters["rope_theta"]
        for layer_type, layer_parameters in by_type.items()
        if "rope_theta" in layer_parameters
    }
    scaling = {
        key: value
        for key, value in by_type.get("full_attention", {}).items()
        if key != "rope_theta"
    }
    if "partial_rotary_factor" in scaling:
        keys["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    rope_type = scaling.setdefault("rope_type", "default")
    if rope_type == "longrope" and "original_max_position_embeddings" in scaling:
        keys["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if model_type in _SCALING_KEYS:
        scaling |= {"type": rope_type}
        scaling = {key: scaling[key] for key in _SCALING_KEYS[model_type] if key in scaling}
    is_scaled = rope_type not in _UNSCALED or len(scaling) > 1
    return keys | {"rope_scaling": scaling if is_scaled else None}


def _first_difference(before: Any, after: Any, name: str = "") -> str | None:
    """Return the name of the first value of `before` that differs in `after`; None without any."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return None if before == after else name
    for key, value in before.items():
        difference = _first_difference(value, after.get(key), f"{name}.{key}".lstrip("."))
        if difference is not None:
            return difference
    return None


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


def count_weights(folder: Path) -> int | None:
    """Return how many numbers the safetensors files of a folder have; None without such files.

    Raises UserError if a file is missing, truncated, or not safetensors.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(
                set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        return sum(_count(folder / name) for name in names) if names else None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of weight files") from None


def _count(path: Path) -> int:
    """Return how many numbers a file has.

    Format: 8 bytes of length, a JSON header, the data (https://github.com/huggingface/safetensors).
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = file.read(min(length, _LARGEST_HEADER))
    try:
        header: dict[str, Any] = parse_json(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        sizes = [end, *(size for entry in header.values() for size in entry["shape"])]
        if not all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes):
            raise ValueError
        count = sum(math.prod(entry["shape"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path}: not a safetensors file") from None
    size = path.stat().st_size
    if size < 8 + length + end:
        raise UserError(f"{path}: truncated: {size} bytes, but its header needs {8 + length + end}")
    return count
