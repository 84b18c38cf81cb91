"""python -m trainer.roleplay FLAGS: GRPO with the five rewards, started as TRL's scripts are.

--model_name M --train_data D [--eval_data E] --output_dir RUN_DIR [--use_lora] [--load_in_4bit]
[--bf16] [--reward_embedding_model URL|FOLDER] ...; any option of TRL's GRPOConfig is a flag, too.

--resume        resume the run in --output_dir
--print_config  print the flags as YAML, for `scorekit train --config`
--help          print this text; docs/how-to/train-roleplay.md has the table of flags
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scorekit.command import clean_exit
from scorekit.config import check_config, refuse_password
from scorekit.documents import DocumentError, parse_yaml
from scorekit.errors import UserError
from trainer.runs.messages import show_messages

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


def main(flags: list[str]) -> int:
    """Run with these flags, and return the exit code."""
    if not flags or {"--help", "-h"} & {*flags}:
        print(__doc__)
        return 0
    from trainer.roleplay.config import RoleplayConfig

    switches = {"--resume", "--print_config"}
    data = config_of([flag for flag in flags if flag not in switches])
    cfg = check_config(RoleplayConfig, data, "flags")
    if "--print_config" in flags:
        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
        return 0
    for flag, value in (("model_name", cfg.policy.path), ("train_data", cfg.data.train)):
        if value is None:
            raise UserError(f"--{flag}: required")
    if "run_dir" not in data.get("misc", {}):
        raise UserError("--output_dir: required. Name the folder of the run")
    Path(cfg.misc.run_dir).parent.mkdir(parents=True, exist_ok=True)
    from trainer.roleplay import commands

    return commands.train(cfg, resume="--resume" in flags)


def config_of(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of a config's YAML for these flags. Raises UserError that names the flag.

    Every key is a flag: `--name value`, or `--name` alone for true. A flag in `FLAGS` or with a
    name of a key of the section `grpo` sets that key; any other is passed to TRL's GRPOConfig
    (`grpo.options`).
    """
    from trainer.roleplay.config import GRPOSection

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


if __name__ == "__main__":
    show_messages()
    prints_result = {"--help", "-h", "--print_config"} & {*sys.argv[1:]}
    with clean_exit(
        stopped="stopped (resume with --resume)", stdout="result" if prints_result else "log"
    ):
        sys.exit(main(sys.argv[1:]))
