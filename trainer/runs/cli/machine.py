"""Check the device and memory of a run, for `scorekit check`."""

from __future__ import annotations

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.report.findings import Findings
from trainer.rl.devices import prepare_torch
from trainer.runs.config import MachineConfig, RunConfig
from trainer.runs.memory import GIB, estimate_memory, free_memory


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
