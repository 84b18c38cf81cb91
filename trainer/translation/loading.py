"""Loads what learns: weights, reference, optimiser, and the prompts that fit. Writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from scorekit.schemas import Info
from scorekit.seeds import stream_seed
from trainer.rl.forward import check_head
from trainer.rl.policy import Reference, load_policy, pad_token_id
from trainer.rl.world import World
from trainer.runs.checkpoints.resume import Origin, prompt_origin, weight_origin
from trainer.runs.learner import Learner
from trainer.translation.config import TrainerConfig
from trainer.translation.config_data import set_key
from trainer.translation.data import Example
from trainer.translation.prompting import Prompt, fitting_prompts

log = logging.getLogger(__name__)


def load_learner(
    cfg: TrainerConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    infos: Mapping[str, Info],
    world: World,
) -> Learner:
    """infos: of the services, by URL. Raises UserError on whatever the user can mend."""
    torch.manual_seed(stream_seed("adapters", cfg.misc.seed))
    # Weights that are shared go to their device in parts, so that none has to hold them all.
    in_parts = world.is_sharded and not cfg.policy.load_in_4bit
    place = torch.device("cpu") if in_parts else world.device
    model, tokenizer = load_policy(cfg.policy, place)
    reference: Reference | None = None
    if cfg.rl.kl_coef or cfg.stop.kl_ceiling is not None:
        shard = world.shard if world.is_sharded else None
        reference = Reference(cfg.policy, model, place, shard)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=cfg.rl.lr, weight_decay=cfg.rl.weight_decay)
    check_head(model)
    learner = Learner(
        model=model,
        tokenizer=tokenizer,
        pad_id=pad_token_id(model, tokenizer),
        reference=reference,
        optimizer=optimizer,
        train=[],
        sets={},
        origin=weight_origin(cfg.policy) | service_origin(infos),
    )
    _make_prompts(learner, cfg, train, sets, world)
    return learner


def service_origin(infos: Mapping[str, Info]) -> Origin:
    """The models behind the services."""
    return {
        f"reward.{info.service}_urls": {"path": url, "model": info.model, "revision": info.revision}
        for url, info in infos.items()
    }


def _make_prompts(
    learner: Learner,
    cfg: TrainerConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    world: World,
) -> None:
    """Of the examples whose prompts fit; says which do not."""
    refuse = cfg.data.overlong_prompts == "refuse"

    def fitting(key: str, path: str | None, examples: Sequence[Example]) -> list[Prompt]:
        sampling = cfg.generation if key == "data.train" else cfg.eval_generation()
        prompts, told = fitting_prompts(
            key, examples, learner.model, learner.tokenizer, sampling, refuse=refuse
        )
        if told and world.is_main:
            log.warning("%s", told)
        learner.origin |= prompt_origin(
            key, path, ((prompt.example.src_text, prompt.ids) for prompt in prompts)
        )
        return prompts

    learner.train = fitting("data.train", cfg.data.train, train)
    for name, examples in sets.items():
        of = cfg.data.held_out.get(name)
        learner.sets[name] = fitting(set_key(name), of.path if of else None, examples)
