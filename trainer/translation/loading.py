"""Load the policy and the prompts that fit. Writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from scorekit.schemas import Info
from trainer.rl.distributed import DistributedContext
from trainer.runs.checkpoints.resume import prompt_origin
from trainer.runs.config import set_key
from trainer.runs.learner import Learner, load_weights
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.prompting import Prompt, fitting_prompts

log = logging.getLogger(__name__)


def load_learner(
    cfg: TranslationConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    infos: Mapping[str, Info],
    world: DistributedContext,
) -> Learner:
    """Return the learner with the prompts that fit, and log the others.

    infos: of the services, by URL.
    Raises UserError for whatever the user can fix.
    """
    learner = load_weights(cfg, world)
    learner.origin |= {
        f"reward.{info.service}_urls": {"path": url, "model": info.model, "revision": info.revision}
        for url, info in infos.items()
    }
    refuse = cfg.data.overlong_prompts == "refuse"

    def fitting(key: str, path: str | None, examples: Sequence[Example]) -> list[Prompt]:
        sampling = cfg.generation if key == "data.train" else cfg.eval_generation()
        prompts, overlong_message = fitting_prompts(
            key, examples, learner.model, learner.tokenizer, sampling, refuse=refuse
        )
        if overlong_message and world.is_main:
            log.warning("%s", overlong_message)
        learner.origin |= prompt_origin(
            key, path, ((prompt.example.src_text, prompt.ids) for prompt in prompts)
        )
        return prompts

    learner.train = fitting("data.train", cfg.data.train, train)
    for name, examples in sets.items():
        eval_set = cfg.data.held_out.get(name)
        learner.sets[name] = fitting(set_key(name), eval_set.path if eval_set else None, examples)
    return learner
