"""Open the sampler that a config names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.engines.vllm_checks import probe_server
from trainer.rl.policy import stop_token_ids, unwrap_distributed, unwrap_peft
from trainer.rl.sampler import Sampler


def probe_engine(cfg: SamplingConfig, *, adapters: bool, images: bool = False) -> str | None:
    """Return the model's name on the vLLM server, or None if this process samples.

    Asked before weights are loaded.
    images: whether prompts have images.
    Raises UserError if the server is unavailable, or does not support what this run needs.
    """
    if cfg.engine == "generate":
        return None
    return probe_server(cfg.vllm, adapters=adapters, images=images)


def open_sampler(
    cfg: SamplingConfig,
    served: str | None,
    model: nn.Module,
    tokenizer: Any,
    world: DistributedContext,
    *,
    adapters: bool,
    run_dir: str | Path,
    role: str = "train",
    banned_token_ids: Sequence[int] = (),
) -> Sampler:
    """Return the sampler of a config. The caller closes it.

    served: the result of `probe_engine`.
    adapters: whether adapters are trained, and not the whole model.
    role: a run_dir may have one sampler of each role at a time.
    banned_token_ids: ids that must not be sampled.
    """
    if served is None:
        return GenerateSampler(model, tokenizer, world, banned_token_ids=banned_token_ids)
    stops = stop_token_ids(unwrap_distributed(model), tokenizer)
    return VLLMSampler(
        cfg.vllm,
        served,
        stops,
        world,
        adapters=adapters,
        run_dir=run_dir,
        role=role,
        banned_token_ids=banned_token_ids,
        image_id=getattr(unwrap_peft(model).config, "image_token_id", None),
    )
