"""Checks before the first update: turns, chat template, rewards, and the ends of replies."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.chat.message_check import MessageCheck
from trainer.chat.render import load_generation_config
from trainer.chat.template_check import Finding, findings_of, label_samples, refuse_errors
from trainer.rl.devices import autocast
from trainer.rl.sampler import preserve_rng_state
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import columns_of, in_both, load_held_out, load_train, missing_facts
from trainer.roleplay.evaluation.evaluate import prompt_ids, sample_replies
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)
#: Number of turns in the template check.
_MAX_CONVERSATIONS = 50


def read_turns(
    cfg: RoleplayConfig, tokenizer: Any
) -> tuple[list[RoleplayTurn], list[RoleplayTurn]]:
    """Return (training turns, held-out turns) whose prompt fits. Raises UserError."""
    train = drop_overlong("data.train", checked_train(cfg, tokenizer), cfg, tokenizer)
    held_out = held_out_turns(cfg, tokenizer)
    if overlap := in_both(train, held_out):
        log.warning("%s", overlap)
    if missing := missing_facts(train):
        log.warning(
            "data.train: of %d turns some have no value for these fields, whose rewards are then "
            "neutral: %s",
            len(train),
            missing,
        )
    return train, held_out


def held_out_turns(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the turns to evaluate on, whose prompt fits; none if the config names none."""
    turns = checked_held_out(cfg, tokenizer)
    return drop_overlong("data.eval", turns, cfg, tokenizer)


def checked_train(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the training turns with messages that are checked for the policy. Raises
    UserError."""
    check = MessageCheck(tokenizer, cfg.chat)
    turns = load_train(cfg.data, check)
    check.log_neutralized("data.train", len(turns))
    return turns


def checked_held_out(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the held-out turns with messages that are checked for the policy. Raises
    UserError."""
    check = MessageCheck(tokenizer, cfg.chat)
    turns = load_held_out(cfg.data, cfg.eval.eval_limit, check)
    check.log_neutralized("data.eval", len(turns))
    return turns


def drop_overlong(
    key: str, turns: Sequence[RoleplayTurn], cfg: RoleplayConfig, tokenizer: Any
) -> list[RoleplayTurn]:
    """Return the turns whose prompt has at most data.max_prompt_length tokens.

    Raises UserError if none of them remains, or if the config refuses the others.
    """
    if not turns:
        return []
    lengths = [len(ids) for ids in prompt_ids(turns, tokenizer, cfg)]
    limit = cfg.data.max_prompt_length or max(lengths)
    accepted = [turn for turn, length in zip(turns, lengths, strict=True) if length <= limit]
    if len(accepted) < len(turns):
        message = (
            f"{key}: {len(turns) - len(accepted)} of {len(turns)} prompts have more than "
            f"data.max_prompt_length {limit} tokens (up to {max(lengths)})"
        )
        if cfg.data.overlong_prompts == "refuse" or not accepted:
            raise UserError(
                f"{message}. Shorten their context (prepare --context), or raise the limit"
            )
        log.warning("%s, and are left out", message)
    return accepted


def chat_findings(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]
) -> list[Finding]:
    """Return the findings of the template check on the first turns with a reference.

    They are checked as they are trained on by SFT, and sampled here.
    """
    conversations = [
        [*turn.prompt, {"role": "assistant", "content": turn.reference}]
        for turn in turns
        if turn.reference
    ][:_MAX_CONVERSATIONS]
    settings = load_generation_config(str(cfg.policy.path), cfg.policy.revision)
    origin, labeled = label_samples(tokenizer, conversations, cfg.chat, "last")
    return findings_of(tokenizer, labeled, origin, settings)


def check_chat(cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]) -> None:
    """Raise UserError if the chat template fails its check, or warn, as start.template_check
    says."""
    hint = "scorekit template-check prints all; start.template_check: warn continues"
    refuse_errors(chat_findings(cfg, tokenizer, turns), cfg.start.template_check, hint)


def try_rewards(turns: Sequence[RoleplayTurn]) -> dict[str, float]:
    """Run every reward function on two rows, before anything is loaded, and return the means.

    Raises what they raise, and UserError if one does not return a number for each row.
    """
    rows = list(turns[:2])
    columns = columns_of(rows)
    prompts = columns.pop("prompt")
    texts = [turn.reference or turn.user_turn for turn in rows]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    means = {}
    for reward in REWARDS:
        values = reward.function(prompts=prompts, completions=completions, **columns)
        if len(values) != len(rows) or not all(map(math.isfinite, values)):
            raise UserError(f"{reward.name}: {values} is not a number for each of {len(rows)} rows")
        means[reward.name] = sum(values) / len(values)
    return means


def sampled_ratio(
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    cfg: RoleplayConfig,
    device: torch.device,
) -> float | None:
    """Return the share of sampled replies that are truncated; log a warning if all are.

    They are sampled as in training for the first start.sample_prompts turns.
    """
    chosen = list(turns[: cfg.start.sample_prompts])
    if not chosen:
        return None
    with preserve_rng_state(model, cfg.misc.seed), autocast(device, cfg.misc.dtype):
        replies = sample_replies(
            prompt_ids(chosen, tokenizer, cfg), model, tokenizer, cfg, evaluation=False
        )
    ratio = sum(not reply.is_complete for reply in replies) / len(replies)
    if ratio == 1.0:
        log.warning(
            "all of %d sampled replies are truncated by grpo.max_completion_length %d "
            "(clipped_ratio 1.0): the policy does not end its turns. Check with: scorekit "
            "template-check --model %s --data %s",
            len(replies),
            cfg.grpo.max_completion_length,
            cfg.policy.path,
            cfg.data.train,
        )
    return ratio
