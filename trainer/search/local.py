"""A policy of a model's folder: what has to be known of it before its weights are loaded; and one
in this process, which searches and learns nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import UserError
from trainer.chat.render import use_template
from trainer.chat.stops import end_ids, load_generation_config
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import (
    load_policy,
    load_tokenizer,
    prepare_torch,
    stop_token_ids,
    without_wrappers,
)
from trainer.search.config import SearchConfig
from trainer.search.sight.reading import PictureReader, load_reader
from trainer.search.turns.joined import TurnIds
from trainer.search.turns.sampled import SampledPolicy, check_sight, context_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reads:
    """How a policy reads an episode. tokenizer: with the run's chat template. reader: of pictures;
    None where it is shown none. never: ids that must not be sampled. context: ids that it reads at
    most. stops: ids at which its turns end, as its files say."""

    tokenizer: Any
    reader: PictureReader | None
    never: Sequence[int]
    context: int
    stops: Sequence[int]

    def ids(self, cfg: SearchConfig, stops: Sequence[int]) -> TurnIds:
        """Of prompts and observations. Raises UserError where turns cannot be joined."""
        return TurnIds(self.tokenizer, cfg.chat, self.reader, stops)


def look_at_policy(cfg: SearchConfig) -> Reads:
    """What is told before the weights of `policy.path` are loaded. Raises UserError on all that
    does not go with the config and can be known by then."""
    from transformers import AutoConfig

    path = str(cfg.policy.path)
    tokenizer = use_template(load_tokenizer(cfg.policy), cfg.chat)
    try:
        model_config = AutoConfig.from_pretrained(path, revision=cfg.policy.revision)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"policy.path: {path}: its config: {reason[:200]}") from None
    reader = load_reader(path, model_config, cfg.episode.sight, cfg.policy.revision)
    never = reader.never if reader is not None else ()
    if cfg.episode.observation == "text":
        reader = None
    settings = load_generation_config(path, cfg.policy.revision)
    stops = sorted({tokenizer.eos_token_id, *end_ids(tokenizer, settings)} - {None})
    found = Reads(tokenizer, reader, never, context_of(model_config, cfg.episode), stops)
    check_sight(found.ids(cfg, stops), cfg.episode)
    return found


def local_policy(cfg: SearchConfig) -> SampledPolicy:
    """Load `policy.path`. Raises UserError."""
    if cfg.generation.engine != "generate":
        raise UserError(
            "generation.engine: here this process samples; name a server in server.url (--policy "
            "URL), and set generate"
        )
    reads = look_at_policy(cfg)
    model, tokenizer = load_policy(cfg.policy, prepare_torch(cfg.misc.device, cfg.misc.threads))
    ids = reads.ids(cfg, stop_token_ids(without_wrappers(model), tokenizer))
    if note := ids.serving_note():
        log.warning("%s", note)
    return SampledPolicy(
        GenerateSampler(model, tokenizer, never=reads.never),
        ids,
        cfg.generation,
        name=str(cfg.policy.path),
        context=reads.context,
        with_logprobs=False,
        seed=cfg.misc.seed,
    )
