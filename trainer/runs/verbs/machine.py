"""What a run computes on, as `python -m trainer check` looks at it."""

from __future__ import annotations

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.report.findings import Findings
from trainer.rl.policy import prepare_torch
from trainer.runs.config import DeviceConfig, RunConfig
from trainer.runs.memory import GIB, estimate_memory, free_memory


def look_at_device(misc: DeviceConfig) -> tuple[torch.device, str]:
    """The device, and its name. Raises UserError on one that is not there."""
    device = prepare_torch(misc.device, misc.threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return device, f"{device} ({name}), {misc.dtype}"


def look_at_memory(
    cfg: RunConfig, model: nn.Module, longest: int, device: torch.device, findings: Findings
) -> tuple[None, str]:
    """What the run will take of the device's memory; in parts in `findings.memory`.

    longest: of the prompts in tokens, what is sampled behind one not counted. Raises UserError
    where there is less.
    """
    rows = estimate_memory(cfg, model, longest)
    total, free = sum(size for _, size in rows), free_memory(device)
    findings.memory = [*rows, ("all", total), (f"free on {device.type}", free)]
    found = f"about {total / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free on {device.type}"
    if total > free:
        raise UserError(
            f"{found}: lower rl.micro_batch_tokens or generation.batch_size, set "
            "policy.gradient_checkpointing, or train adapters (policy.lora.r)"
        )
    return None, found
