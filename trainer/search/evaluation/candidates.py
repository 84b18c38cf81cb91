"""The policies that an evaluation asks: of a folder or hub id, by this process or its vLLM sampler,
or behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scorekit.errors import UserError
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import autocast, stop_token_ids, without_wrappers
from trainer.rl.world import World
from trainer.runs.checkpoints.adapted import load_on_base, on_its_base
from trainer.search.config import SearchConfig
from trainer.search.local import Reads, look_at_policy
from trainer.search.neighbours import open_policy
from trainer.search.turns.policies import Policy
from trainer.search.turns.sampled import SampledPolicy

_SEED = 0  # of sampled turns: the same policy gives the same episodes


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A policy to evaluate. name: as it was named. cfg: with the model that is loaded, and how its
    turns are sampled. adapters: that are put on it. reads: None behind a URL. served: its name at
    the vLLM server that samples. folder: where its evaluation is written."""

    name: str
    cfg: SearchConfig
    folder: Path
    adapters: Path | None = None
    reads: Reads | None = None
    served: str | None = None


def candidate_of(cfg: SearchConfig, folder: Path, named: str | None = None) -> SearchCandidate:
    """The config's policy; or another one, by its folder, hub id or URL (`URL#MODEL`; without a
    model's name, that of the config). Raises UserError where it is not there, or does not go with
    the config."""
    if named is not None:
        cfg = _renamed(cfg, named)
    if cfg.server.url is not None:
        model = f" ({cfg.server.model})" if cfg.server.model else ""
        return SearchCandidate(f"{cfg.server.url}{model}", cfg, folder)
    if cfg.policy.path is None:
        raise UserError("no policy: set server.url, or policy.path to a model's folder or hub id")
    name = str(cfg.policy.path)
    base, adapters = on_its_base(cfg.policy)
    cfg = cfg.model_copy(update={"policy": base})
    reads = look_at_policy(cfg)
    served = probe_engine(cfg.generation, adapters=base.lora.r > 0, images=reads.reader is not None)
    return SearchCandidate(name, cfg, folder, adapters, reads, served)


def _renamed(cfg: SearchConfig, named: str) -> SearchConfig:
    """The same with another policy."""
    if named.startswith(("http://", "https://")):
        url, _, model = named.partition("#")
        server = {"url": url, "model": model or cfg.server.model}
        sampling = cfg.generation.model_copy(update={"engine": "generate"})
        own = {"server": cfg.server.model_copy(update=server), "generation": sampling}
        return cfg.model_copy(update=own)
    policy = {"path": named, "tokenizer": None, "revision": None}
    return cfg.model_copy(
        update={
            "policy": cfg.policy.model_copy(update=policy),
            "server": cfg.server.model_copy(update={"url": None}),
        }
    )


@contextmanager
def opened(candidate: SearchCandidate, world: World) -> Iterator[Policy]:
    """It as it takes turns. Raises UserError."""
    cfg, reads = candidate.cfg, candidate.reads
    if reads is None:
        with open_policy(cfg) as policy:
            yield policy
        return
    model, _ = load_on_base(cfg.policy, candidate.adapters, world.device)
    if world.is_sharded:
        world.shard(without_wrappers(model))  # it is what generates
    with ExitStack() as held:
        sampler = open_sampler(
            cfg.generation,
            candidate.served,
            model,
            reads.tokenizer,
            world,
            adapters=cfg.policy.lora.r > 0,
            run_dir=cfg.misc.run_dir,
            role="evaluate",
            never=reads.never,
        )
        held.enter_context(closing(sampler))
        held.enter_context(autocast(world.device, cfg.misc.dtype))
        sampler.sync(model, 0)
        yield SampledPolicy(
            sampler,
            reads.ids(cfg, stop_token_ids(without_wrappers(model), reads.tokenizer)),
            cfg.generation,
            name=candidate.name,
            context=reads.context,
            world=world,
            with_logprobs=False,
            seed=_SEED,
        )
