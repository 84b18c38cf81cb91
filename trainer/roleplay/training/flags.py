"""TRL-style flags: every key is a flag, `--name value`, or `--name` alone for true.

A flag in `FLAGS` or with a name of a key of the section `grpo` sets that key; any other is passed
to TRL's GRPOConfig (`grpo.options`). The result is a config as from YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scorekit.config import refuse_password
from scorekit.documents import DocumentError, parse_yaml
from scorekit.errors import UserError
from trainer.roleplay.config import GRPOSection

#: Flag -> its config key.
FLAGS = {
    "model_name": "policy.path",
    "model_name_or_path": "policy.path",
    "model_revision": "policy.revision",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "lora_r": "policy.lora.r",
    "lora_alpha": "policy.lora.alpha",
    "lora_target_modules": "policy.lora.target_modules",
    "load_in_4bit": "policy.load_in_4bit",
    "bnb_4bit_quant_type": "policy.bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "policy.bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype": "policy.bnb_4bit_compute_dtype",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "max_prompt_length": "data.max_prompt_length",
    "chat_template": "chat.template",
    "enable_thinking": "chat.enable_thinking",
    "reward_embedding_model": "reward.embedding_model",
    "reward_embedding_batch_size": "reward.embedding_batch_size",
    "reward_calibration": "reward.calibration",
    "per_device_eval_batch_size": "eval.batch_size",
    "eval_steps": "eval.eval_every_n_updates",
    "eval_limit": "eval.eval_limit",
    "train_limit": "data.train_limit",
    "output_dir": "misc.run_dir",
    "overwrite_output_dir": "misc.overwrite",
    "save_steps": "misc.save_every_n_updates",
    "save_total_limit": "misc.keep_checkpoints",
    "seed": "misc.seed",
    "report_to": "misc.trackers",
}
#: Default rank of the adapters with `--use_lora`.
LORA_R = 16
#: Flags that set several keys, or none alone.
_COMPOSED = ("bf16", "use_lora", "use_cpu")


def config_of(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of a config's YAML for these flags. Raises UserError that names the
    flag."""
    data: dict[str, Any] = {"task": "roleplay"}
    values = dict(_pairs(flags))
    grpo_keys = GRPOSection.model_fields.keys() - {"options"}
    for name, value in values.items():
        if name in _COMPOSED:
            continue
        key = FLAGS.get(name) or (f"grpo.{name}" if name in grpo_keys else f"grpo.options.{name}")
        _put(data, key, value)
    if "report_to" in values:
        _put(data, "misc.trackers", _trackers(values["report_to"]))
    _compose(data, values)
    return data


def _compose(data: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set keys that depend on several flags, and flags that set several keys."""
    lora = _is_on("use_lora", values)
    if lora and "lora_r" not in values:
        _put(data, "policy.lora.r", LORA_R)
    if not lora:
        lora_flags = [name for name in values if name.startswith("lora_")]
        if lora_flags:
            raise UserError(f"--{lora_flags[0]} requires --use_lora")
        if _is_on("load_in_4bit", values):
            raise UserError("--load_in_4bit freezes the weights. Add --use_lora")
    if _is_on("bf16", values):
        _put(data, "misc.dtype", "bfloat16")
        if lora:  # the frozen weights; trained ones are float32
            _put(data, "policy.weights_dtype", "bfloat16")
    if _is_on("use_cpu", values):
        _put(data, "misc.device", "cpu")


def _is_on(name: str, values: Mapping[str, Any]) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"--{name}: {value!r} is neither true nor false")
    return value


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value).split(",")
    return [name for name in names if name not in ("none", "None")]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each flag; the value may follow after `=`, or be left out for true."""
    remaining = list(flags)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r:.80}: expected a flag (--name value)")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        words = [text] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            words.append(remaining.pop(0))
        for value in words:
            refuse_password(value, f"--{name}", "name the address without it")
        yield name, _value(words)


def _value(words: Sequence[str]) -> Any:
    if not words:
        return True
    values = [_read(word) for word in words]
    return values[0] if len(values) == 1 else values


def _read(word: str) -> Any:
    """Parse a value as YAML; `2e-6`, which is a text in YAML 1.1, becomes a number."""
    try:
        value = parse_yaml(word)
    except DocumentError:
        return word
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return word
    return word if value is None and word not in ("null", "None", "") else value


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value
