"""`scorekit sft`: run an SFT config, with flags for common keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from scorekit.config import check_config, read_config
from trainer.sft.config import SftConfig

#: Default rank of the adapters with `--use_lora`.
LORA_R = 16
#: Flag -> its config key.
KEYS = {
    "model_name": "policy.path",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "output_dir": "misc.run_dir",
    "max_length": "data.max_length",
    "learning_rate": "sft.learning_rate",
    "num_train_epochs": "sft.num_train_epochs",
    "per_device_train_batch_size": "sft.per_device_train_batch_size",
    "gradient_accumulation_steps": "sft.gradient_accumulation_steps",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "load_in_4bit": "policy.load_in_4bit",
}


def _option(name: str, help: str | None = None) -> Any:
    return typer.Option(f"--{name}", help=help or KEYS[name])


ConfigFile = Annotated[Path | None, typer.Option("--config", help="The run's config (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]


def sft(
    config: ConfigFile = None,
    set_: Overrides = None,
    model_name: Annotated[str | None, _option("model_name")] = None,
    train_data: Annotated[str | None, _option("train_data")] = None,
    eval_data: Annotated[str | None, _option("eval_data")] = None,
    output_dir: Annotated[str | None, _option("output_dir")] = None,
    max_length: Annotated[int | None, _option("max_length")] = None,
    learning_rate: Annotated[float | None, _option("learning_rate")] = None,
    num_train_epochs: Annotated[float | None, _option("num_train_epochs")] = None,
    per_device_train_batch_size: Annotated[
        int | None, _option("per_device_train_batch_size")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None, _option("gradient_accumulation_steps")
    ] = None,
    gradient_checkpointing: Annotated[bool, _option("gradient_checkpointing")] = False,
    load_in_4bit: Annotated[bool, _option("load_in_4bit")] = False,
    bf16: Annotated[bool, _option("bf16", "misc.dtype=bfloat16")] = False,
    use_lora: Annotated[bool, _option("use_lora", f"policy.lora.r={LORA_R}, if it is 0")] = False,
    resume: Annotated[bool, _option("resume", "Resume the run in misc.run_dir.")] = False,
    debug_label_mask: Annotated[
        bool, _option("debug_label_mask", "Print the labels of the first rows.")
    ] = False,
    debug_only: Annotated[
        bool, _option("debug_only", "Then exit: 2 if the template check fails.")
    ] = False,
) -> None:
    """Train on conversations, or ids with a mask, on TRL's SFTTrainer.

    Exit code 2: an error of the config, data or chat template. 143, 130: SIGTERM or Ctrl-C ended
    the run, after an update and with its checkpoint; --resume continues.
    """
    flags = locals()
    data = _with_flags(read_config(config, set_), flags)
    cfg = check_config(SftConfig, data, config or "flags")
    from trainer.sft.commands import debug, train

    if debug_label_mask or debug_only:
        code = debug(cfg)
        if debug_only:
            raise typer.Exit(code)
    raise typer.Exit(train(cfg, resume=resume))


def _with_flags(data: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values, overridden by those of the flags."""
    values = {key: flags[name] for name, key in KEYS.items() if flags[name] not in (None, False)}
    if flags["bf16"]:
        values["misc.dtype"] = "bfloat16"
    for key, value in values.items():
        section, _, name = key.partition(".")
        data[section] = {**(data.get(section) or {}), name: value}
    if flags["use_lora"]:
        policy = data.setdefault("policy", {})
        lora = policy.get("lora") or {}
        policy["lora"] = lora | {"r": lora.get("r") or LORA_R}
    return data
