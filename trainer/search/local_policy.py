"""Check a policy before its weights are loaded, and load one that samples in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.errors import UserError
from trainer.chat.render import end_ids, load_generation_config, use_template
from trainer.rl.devices import prepare_torch
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import (
    load_policy,
    load_tokenizer,
    read_config,
    stop_token_ids,
    unwrap_peft,
)
from trainer.search.config import SearchConfig
from trainer.search.images.processor import ImageProcessor, load_reader
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.sampled import SampledPolicy, check_sight, context_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs that a policy reads, and its limits.

    tokenizer: with the run's chat template. reader: processor of images; None if the policy gets
    none. banned_token_ids: ids that must not be sampled. context: max ids that it reads. stops: ids
    at which its turns end, from its files.
    """

    tokenizer: Any
    reader: ImageProcessor | None
    banned_token_ids: Sequence[int]
    context: int
    stops: Sequence[int]

    def ids(self, cfg: SearchConfig, stops: Sequence[int]) -> TurnTokenizer:
        """Return the tokenizer of turns. Raises UserError if turns cannot be joined."""
        return TurnTokenizer(self.tokenizer, cfg.chat, self.reader, stops)


def inspect_policy(cfg: SearchConfig) -> PolicyInputs:
    """Read and check the files of `policy.path` except the weights.

    Raises UserError for all that does not match the config.
    """
    path = str(cfg.policy.path)
    tokenizer = use_template(load_tokenizer(cfg.policy), cfg.chat)
    model_config = read_config(path, cfg.policy.revision, "policy.path")
    reader = load_reader(path, model_config, cfg.episode.sight, cfg.policy.revision)
    banned_token_ids = reader.banned_token_ids if reader is not None else ()
    if cfg.episode.observation == "text":
        reader = None
    settings = load_generation_config(path, cfg.policy.revision)
    stops = sorted({tokenizer.eos_token_id, *end_ids(tokenizer, settings)} - {None})
    policy_inputs = PolicyInputs(
        tokenizer, reader, banned_token_ids, context_of(model_config, cfg.episode), stops
    )
    check_sight(policy_inputs.ids(cfg, stops), cfg.episode)
    return policy_inputs


def local_policy(cfg: SearchConfig) -> SampledPolicy:
    """Load `policy.path`. Raises UserError."""
    if cfg.generation.engine != "generate":
        raise UserError(
            "generation.engine: this command samples in its own process. Set generate, or name a "
            "server in server.url (--policy URL)."
        )
    policy_inputs = inspect_policy(cfg)
    model, tokenizer = load_policy(cfg.policy, prepare_torch(cfg.misc.device, cfg.misc.threads))
    ids = policy_inputs.ids(cfg, stop_token_ids(unwrap_peft(model), tokenizer))
    if note := ids.serving_note():
        log.warning("%s", note)
    return SampledPolicy(
        GenerateSampler(model, tokenizer, banned_token_ids=policy_inputs.banned_token_ids),
        ids,
        cfg.generation,
        name=str(cfg.policy.path),
        context=policy_inputs.context,
        with_logprobs=False,
        seed=cfg.misc.seed,
        deterministic=cfg.rollout.deterministic,
    )
