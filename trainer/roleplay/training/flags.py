"""TRL's way to start a run: every key a flag, `--name value` or `--name` alone for yes.

A flag that stands in `FLAGS` or names a key of the section `grpo` sets that key; any other is given
to TRL's GRPOConfig by its name (`grpo.options`). The result is a config as YAML would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from scorekit.config import refuse_password
from scorekit.errors import UserError
from trainer.roleplay.config import GRPOSection

#: Flag -> the key that it sets.
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
#: Rank of the adapters where `--use_lora` names none.
LORA_R = 16
#: Flags that mean several keys, or none alone.
_COMPOSED = ("bf16", "use_lora", "use_cpu")


def config_of(flags: Sequence[str]) -> dict[str, Any]:
    """Flags -> what a config's YAML would hold. Raises UserError that names the flag."""
    data: dict[str, Any] = {"task": "roleplay"}
    told = dict(_pairs(flags))
    own = GRPOSection.model_fields.keys() - {"options"}
    for name, value in told.items():
        if name in _COMPOSED:
            continue
        key = FLAGS.get(name) or (f"grpo.{name}" if name in own else f"grpo.options.{name}")
        _put(data, key, value)
    if "report_to" in told:
        _put(data, "misc.trackers", _trackers(told["report_to"]))
    _compose(data, told)
    return data


def _compose(data: dict[str, Any], told: Mapping[str, Any]) -> None:
    """What takes more than one flag, or sets more than one key."""
    lora = _is_on("use_lora", told)
    if lora and "lora_r" not in told:
        _put(data, "policy.lora.r", LORA_R)
    if not lora:
        given = [name for name in told if name.startswith("lora_")]
        if given:
            raise UserError(f"--{given[0]} needs --use_lora")
        if _is_on("load_in_4bit", told):
            raise UserError("--load_in_4bit freezes the weights: give --use_lora, too")
    if _is_on("bf16", told):
        _put(data, "misc.dtype", "bfloat16")
        if lora:  # the weights that do not learn; those that do are float32
            _put(data, "policy.weights_dtype", "bfloat16")
    if _is_on("use_cpu", told):
        _put(data, "misc.device", "cpu")


def _is_on(name: str, told: Mapping[str, Any]) -> bool:
    value = told.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"--{name}: {value!r} is neither true nor false")
    return value


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value).split(",")
    return [name for name in names if name not in ("none", "None")]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each flag, whose value may follow behind `=`, or be left out for yes."""
    left = list(flags)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r:.80}: a flag is wanted (--name value)")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        words = [text] if equals else []
        while not equals and left and not left[0].startswith("--"):
            words.append(left.pop(0))
        for one in words:
            refuse_password(one, f"--{name}", "name the address without it")
        yield name, _value(words)


def _value(words: Sequence[str]) -> Any:
    if not words:
        return True
    values = [_read(word) for word in words]
    return values[0] if len(values) == 1 else values


def _read(word: str) -> Any:
    """As YAML reads it; `2e-6`, which YAML 1.1 takes for a text, is a number here."""
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
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
