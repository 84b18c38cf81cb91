"""What runs on TRL's trainers share: their options out of a run's config, one process, one device.
The options are transformers' own."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel
from torch import nn

from scorekit.config import nearest
from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig

#: Options of TRL that are keys of ours: what to set instead.
OURS = {
    "output_dir": "misc.run_dir",
    "overwrite_output_dir": "misc.overwrite",
    "seed": "misc.seed",
    "data_seed": "misc.seed",
    "bf16": "misc.dtype: bfloat16",
    "use_cpu": "misc.device: cpu",
    "gradient_checkpointing": "policy.gradient_checkpointing",
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
    "load_best_model_at_end": "`python -m trainer export --best`",
    "metric_for_best_model": "`python -m trainer export --best`",
    "model_init_kwargs": "policy",
}
#: What the names of options begin with that these commands do not do.
REFUSED = (
    "fp16",
    "push_to_hub",
    "hub_",
    "deepspeed",
    "fsdp",
    "parallelism_config",
    "log_completions_hub",
)


class OnTrl(Protocol):
    """The config of a run on TRL, as far as it is read here. misc: of FolderConfig and
    DeviceConfig."""

    @property
    def policy(self) -> PolicyConfig: ...

    @property
    def misc(self) -> Any: ...


def trl_arguments(
    kind: Any,
    name: str,
    section: BaseModel,
    cfg: OnTrl,
    device: torch.device,
    *,
    left_out: Collection[str] = (),
    ours: Mapping[str, str] = OURS,
    **told: Any,
) -> Any:
    """TRL's arguments of a run: all that matters is told, nothing is left to a default that another
    version may change.

    kind: TRL's class of them. name, section: the config's section in TRL's names, whose `options`
    hold any other of TRL's; those of its keys in `left_out` are not TRL's. told: wins over both.
    ours: options that are not to be given, and what to set instead. Raises UserError.
    """
    # An earlier run of this process left its precision here, which transformers reads
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    keys = section.model_dump()
    options: dict[str, Any] = keys.pop("options")
    for option in options:
        _check_option(option, name, keys, ours, kind)
    given = {key: value for key, value in keys.items() if key not in left_out} | options
    given |= {
        "max_steps": keys["max_steps"] or -1,
        "output_dir": cfg.misc.run_dir,
        "seed": cfg.misc.seed,
        "bf16": cfg.misc.dtype == "bfloat16",
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": cfg.policy.gradient_checkpointing,
        "remove_unused_columns": False,
        # What is evaluated, saved and logged when is for a callback of ours to say
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    try:
        return kind(**given | told)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None


def _check_option(
    option: str, name: str, keys: Mapping[str, Any], ours: Mapping[str, str], kind: Any
) -> None:
    where = f"{name}.options.{option}"
    if option in keys:
        raise UserError(f"{where}: set {name}.{option}")
    if option in ours:
        raise UserError(f"{where}: set in its place {ours[option]}")
    if option.startswith(REFUSED):
        raise UserError(f"{where}: this command does not do that; use TRL's own")
    known = kind.__dataclass_fields__
    if option not in known:
        close = nearest(option, {one: one for one in known})
        meant = f" (did you mean {close}?)" if close else ""
        raise UserError(f"{where}: TRL's {kind.__name__} has no such option{meant}")


def check_alone(task: str) -> None:
    """Raise UserError where several processes would share a run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{task} runs in one process: start it without torchrun or accelerate")


def one_device(device: torch.device, task: str) -> torch.device:
    """Raises UserError where transformers would choose another than is meant."""
    if device.type == "cuda" and (device.index is not None or torch.cuda.device_count() > 1):
        raise UserError(
            f"misc.device: {task} learns on one GPU: let CUDA_VISIBLE_DEVICES show that one alone, "
            "and set misc.device to cuda or auto"
        )
    return device


def learn_in_float32(network: nn.Module) -> None:
    """TRL holds adapters on 4-bit weights in bfloat16, which rounds small updates away, and a
    checkpoint of them is loaded in float32: a run that goes on would be another."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def trackers_folder(cfg: OnTrl) -> Path:
    """Where trackers write that write files."""
    return Path(cfg.misc.run_dir) / "trackers"
