"""Open the policies of an evaluation: a folder or hub id sampled here or by vLLM, or a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scorekit.errors import UserError
from scorekit.net.addresses import address_of
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy.devices import autocast
from trainer.rl.policy.tokens import stop_token_ids
from trainer.rl.policy.wrappers import unwrap_peft
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.search.config import SearchConfig
from trainer.search.rollout.episode import Policy
from trainer.search.rollout.sampled import PolicyInputs, SampledPolicy, inspect_policy
from trainer.search.services import open_policy

_SEED = 0  # of sampled turns, so the same policy gives the same episodes


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A policy to evaluate.

    name: as the user named it. cfg: with the model to load and the sampling settings. adapters:
    folder of its adapters. reads: None behind a URL. served: its name at the vLLM server that
    samples. folder: output folder of its evaluation.
    """

    name: str
    cfg: SearchConfig
    folder: Path
    adapters: Path | None = None
    policy_inputs: PolicyInputs | None = None
    served: str | None = None


def candidate_of(cfg: SearchConfig, folder: Path, named: str | None = None) -> SearchCandidate:
    """Return the config's policy, or another one by folder, hub id or URL.

    named: a URL may have the form `URL#MODEL`; the default is the model of the config. Raises
    UserError if the policy does not exist or does not match the config.
    """
    if named is not None:
        cfg = _renamed(cfg, named)
    if cfg.server.url is not None:
        model = f" ({cfg.server.model})" if cfg.server.model else ""
        return SearchCandidate(f"{address_of(cfg.server.url)}{model}", cfg, folder)
    if cfg.policy.path is None:
        raise UserError("policy.path: not set. Name a model's folder or hub id, or set server.url.")
    name = str(cfg.policy.path)
    base, adapters = resolve_base_model(cfg.policy)
    cfg = cfg.model_copy(update={"policy": base})
    policy_inputs = inspect_policy(cfg)
    served = probe_engine(
        cfg.generation, adapters=base.lora.r > 0, images=policy_inputs.reader is not None
    )
    return SearchCandidate(name, cfg, folder, adapters, policy_inputs, served)


def _renamed(cfg: SearchConfig, named: str) -> SearchConfig:
    """Return the config with another policy."""
    if named.startswith(("http://", "https://")):
        url, _, model = named.partition("#")
        server = {"url": url, "model": model or cfg.server.model}
        sampling = cfg.generation.model_copy(update={"engine": "generate"})
        update = {"server": cfg.server.model_copy(update=server), "generation": sampling}
        return cfg.model_copy(update=update)
    policy = {"path": named, "tokenizer": None, "revision": None}
    return cfg.model_copy(
        update={
            "policy": cfg.policy.model_copy(update=policy),
            "server": cfg.server.model_copy(update={"url": None}),
        }
    )


@contextmanager
def opened(candidate: SearchCandidate, world: DistributedContext) -> Iterator[Policy]:
    """Open the policy of a candidate. Raises UserError."""
    cfg, policy_inputs = candidate.cfg, candidate.policy_inputs
    if policy_inputs is None:
        with open_policy(cfg) as policy:
            yield policy
        return
    model, _ = load_on_base(cfg.policy, candidate.adapters, world.device)
    if world.is_sharded:
        world.shard(unwrap_peft(model))  # these weights generate
    sampler = open_sampler(
        cfg.generation,
        candidate.served,
        model,
        policy_inputs.tokenizer,
        world,
        adapters=cfg.policy.lora.r > 0,
        run_dir=cfg.misc.run_dir,
        role="evaluate",
        banned_token_ids=policy_inputs.banned_token_ids,
    )
    with closing(sampler), autocast(world.device, cfg.misc.dtype):
        sampler.sync_weights(model, 0)
        yield SampledPolicy(
            sampler,
            policy_inputs.ids(cfg, stop_token_ids(unwrap_peft(model), policy_inputs.tokenizer)),
            cfg.generation,
            name=candidate.name,
            context=policy_inputs.context,
            world=world,
            with_logprobs=False,
            seed=_SEED,
            deterministic=cfg.rollout.deterministic,
        )
