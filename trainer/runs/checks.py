"""Check model, machine and folders of a run before its weights are loaded, for `scorekit check`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.report.findings import Findings
from trainer.rl.config import PolicyConfig
from trainer.rl.devices import prepare_torch
from trainer.rl.model_files import count_weights
from trainer.rl.policy import (
    check_4bit,
    check_folder,
    check_has_base_model,
    freeze_vision,
    with_adapters,
    without_weights,
)
from trainer.runs.checkpoints.checkpoint import model_folder, read_state
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.config import MachineConfig, RunConfig
from trainer.runs.memory import GIB, estimate_memory, free_memory
from trainer.runs.run_log import check_run_dir, open_run_dir
from trainer.runs.trackers import check_trackers


def check_model(
    cfg: PolicyConfig, path: str | None, key: str, *, trl: bool = False
) -> tuple[nn.Module, str]:
    """Return the model without its weights, on the meta device, and a description of its size.

    trl: TRL trains it, see `with_adapters`.
    Raises UserError if its files have fewer weights.
    """
    from transformers import AutoConfig, GenerationConfig

    if path is None:
        raise UserError(f"{key}: required. Set the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_folder(path, key)
    check_has_base_model(path, key)
    revision = cfg.revision if key == "policy.path" else None
    try:
        folder = model_folder(path, revision)
        model = without_weights(AutoConfig.from_pretrained(folder))
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key}: {path}: {reason}") from None
    with suppress(OSError):  # there may be none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    expected_count = sum(parameter.numel() for parameter in model.parameters())
    file_count = count_weights(folder)
    if file_count is not None and file_count < expected_count:
        raise UserError(
            f"{key}: {path}: has {file_count:,} weights, but its config defines {expected_count:,}"
        )
    description = f"{type(model).__name__}, {expected_count:,} weights"
    if key != "policy.path":
        return model, description
    if cfg.lora.r:
        model = with_adapters(model, cfg, trl=trl)
    freeze_vision(model)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trained < expected_count:
        description += f", {num_trained:,} {'in adapters ' if cfg.lora.r else ''}trained"
    return model, description


def check_device(misc: MachineConfig) -> tuple[torch.device, str]:
    """Return the device, and its name. Raises UserError if it does not exist."""
    device = prepare_torch(misc.device, misc.threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return device, f"{device} ({name}), {misc.dtype}"


def check_memory(
    cfg: RunConfig, model: nn.Module, longest: int, device: torch.device, findings: Findings
) -> tuple[None, str]:
    """Compare the run's memory with the device's; the parts go to `findings.memory`.

    longest: tokens of the longest prompt, without the completion.
    Raises UserError if there is too little.
    """
    rows = estimate_memory(cfg, model, longest)
    total, free = sum(size for _, size in rows), free_memory(device)
    findings.memory = [*rows, ("all", total), (f"free on {device.type}", free)]
    message = f"about {total / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free on {device.type}"
    if total > free:
        raise UserError(
            f"{message}. Lower rl.micro_batch_tokens or generation.batch_size, set "
            "policy.gradient_checkpointing, or train adapters (policy.lora.r)"
        )
    return None, message


def check_output_paths(findings: Findings, cfg: Any) -> None:
    """Check trackers and folder of a run.

    cfg: of any task.
    """
    findings.run_check("misc.trackers", _trackers, cfg)
    findings.run_check("misc.run_dir", _run_dir, cfg)


def _trackers(cfg: Any) -> tuple[None, str]:
    check_trackers(cfg.misc.trackers)
    return None, ", ".join(cfg.misc.trackers) or "none but log.jsonl"


def _run_dir(cfg: Any) -> tuple[None, str]:
    """Check that the folder is fit for a new run, or for resuming the one in it."""
    folder = Path(cfg.misc.run_dir)
    if folder.is_file():
        raise UserError(f"misc.run_dir: {folder} is a file")
    open_run_dir(cfg.misc)
    if any(folder.glob("checkpoints/step-*")) and not cfg.misc.overwrite:
        checkpoint = checkpoint_to_resume(cfg)
        done = read_state(checkpoint).update if checkpoint else 0
        return None, f"{folder}: has a run of {done} updates. Resume it with --resume"
    check_run_dir(cfg)
    return None, f"{folder}: can be written to"
