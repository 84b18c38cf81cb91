"""Shared by runs on TRL's trainers: their options from a run's config, and one device a process.

The options are those of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from scorekit.config import nearest
from scorekit.errors import UserError
from trainer.runs.config import KeptConfig

#: Options of TRL that are keys of our config: what to set instead.
OURS = {
    "output_dir": "misc.run_dir",
    "overwrite_output_dir": "misc.overwrite",
    "seed": "misc.seed",
    "data_seed": "misc.seed",
    "bf16": "misc.dtype: bfloat16",
    "use_cpu": "misc.device: cpu",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "activation_checkpointing": "policy.gradient_checkpointing",
    "per_device_eval_batch_size": "eval.batch_size",
    "do_eval": "data.eval",
    "eval_strategy": "eval.eval_every_n_updates",
    "eval_steps": "eval.eval_every_n_updates",
    "save_strategy": "misc.save_every_n_updates",
    "save_steps": "misc.save_every_n_updates",
    "save_total_limit": "misc.keep_checkpoints",
    "logging_strategy": "log.jsonl, which has a line for each update",
    "logging_steps": "log.jsonl, which has a line for each update",
    "logging_dir": "misc.trackers",
    "report_to": "misc.trackers",
    "run_name": "misc.run_dir",
    "resume_from_checkpoint": "the command's --resume",
    "load_best_model_at_end": "`scorekit export --best`",
    "metric_for_best_model": "`scorekit export --best`",
    "model_init_kwargs": "policy",
}
#: First letters of options that these commands do not support.
REFUSED = (
    "fp16",
    "push_to_hub",
    "hub_",
    "deepspeed",
    "fsdp",
    "parallelism_config",
    "log_completions_hub",
)


def trl_arguments(
    kind: Any,
    name: str,
    section: BaseModel,
    cfg: KeptConfig,
    device: torch.device,
    *,
    left_out: Collection[str] = (),
    reserved: Mapping[str, str] = OURS,
    **overrides: Any,
) -> Any:
    """Return TRL's arguments of a run, with no default that another version may change.

    kind: TRL's class of arguments.
    name, section: the config's section in TRL's names, whose `options` have any other of TRL's.
    Keys in `left_out` are not TRL's.
    reserved: options that must not be set, and what to set instead.
    overrides: arguments that win over both.
    Raises UserError.
    """
    # An earlier run in this process left its precision in the environment, which transformers reads
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    misc = cfg.misc
    keys = section.model_dump()
    options: dict[str, Any] = keys.pop("options")
    for option in options:
        _check_option(option, name, keys, reserved, kind)
    arguments = {key: value for key, value in keys.items() if key not in left_out} | options
    arguments |= {
        "max_steps": keys["max_steps"] or -1,
        "output_dir": misc.run_dir,
        "seed": misc.seed,
        "bf16": misc.dtype == "bfloat16",
        "use_cpu": device.type == "cpu",
        _checkpointing_option(kind): cfg.policy.gradient_checkpointing,
        "remove_unused_columns": False,
        # A callback of ours decides what is evaluated, saved and logged
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    try:
        return kind(**arguments | overrides)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None


def _checkpointing_option(kind: Any) -> str:
    """Return the option's name: transformers 5.24 renamed it, and warns of the old one."""
    new = "activation_checkpointing"
    return new if new in kind.__dataclass_fields__ else "gradient_checkpointing"


def _check_option(
    option: str, name: str, keys: Mapping[str, Any], reserved: Mapping[str, str], kind: Any
) -> None:
    key = f"{name}.options.{option}"
    if option in keys:
        raise UserError(f"{key}: set {name}.{option}")
    if option in reserved:
        raise UserError(f"{key}: set {reserved[option]} instead")
    if option.startswith(REFUSED):
        raise UserError(f"{key}: this command does not support it. Use TRL's own")
    valid_names = kind.__dataclass_fields__
    if option not in valid_names:
        close = nearest(option, {valid_name: valid_name for valid_name in valid_names})
        suggestion = f" (did you mean {close}?)" if close else ""
        raise UserError(f"{key}: TRL's {kind.__name__} has no such option{suggestion}")


def one_device(device: torch.device, task: str, processes: int) -> torch.device:
    """Return the device. Raises UserError if transformers would choose another one."""
    several = processes == 1 and device.type == "cuda" and torch.cuda.device_count() > 1
    if device.type == "cuda" and (device.index is not None or several):
        raise UserError(
            f"misc.device: a process of {task} trains on one GPU. Set misc.device to cuda or auto, "
            "and CUDA_VISIBLE_DEVICES to that one; or start a process for each GPU (accelerate "
            "launch)"
        )
    return device


def learn_in_float32(network: nn.Module) -> None:
    """Convert the trained parameters to float32.

    TRL keeps adapters on 4-bit weights in bfloat16, which rounds small updates away. A checkpoint
    of them is loaded in float32, so that a resumed run would differ.
    """
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def remove_printers(trainer: Any) -> None:
    """Remove the callbacks of transformers that print: a run has a console of its own."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
