"""The sampler that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainer.rl.config import SamplingConfig
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.vllm import VLLMSampler, probe_server
from trainer.rl.policy import stop_token_ids, unwrapped
from trainer.rl.sampler import Sampler
from trainer.rl.world import World


def probe_engine(cfg: SamplingConfig, *, adapters: bool) -> str | None:
    """The model's name on the server that is to sample, asked before weights are loaded; None where
    this process samples. Raises UserError where it is away, or cannot do what is wanted of it."""
    return probe_server(cfg.vllm, adapters=adapters) if cfg.engine == "vllm" else None


def open_sampler(
    cfg: SamplingConfig,
    served: str | None,
    model: nn.Module,
    tokenizer: Any,
    world: World,
    *,
    adapters: bool,
    run_dir: str | Path,
    role: str = "train",
) -> Sampler:
    """served: what `probe_engine` gave. adapters: they learn, not the whole model. role: a run_dir
    may have a sampler of each role at a time. To be closed."""
    if served is None:
        return GenerateSampler(model, tokenizer, world)
    stops = stop_token_ids(unwrapped(model), tokenizer)
    return VLLMSampler(
        cfg.vllm, served, stops, world, adapters=adapters, run_dir=run_dir, role=role
    )
