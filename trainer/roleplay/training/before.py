"""What is looked at before the first update: turns, chat template, rewards, and how replies end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.chat.boundaries import Finding, check_template, refuse_faults
from trainer.rl.policy import autocast
from trainer.rl.sampler import undisturbed
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import columns_of, in_both, load_held_out, load_train, untold
from trainer.roleplay.evaluation.evaluate import prompt_ids, sample_replies
from trainer.roleplay.rendering import fitting_turns
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.checkpoints.checkpoint import model_folder

log = logging.getLogger(__name__)
#: Turns that the template check looks at.
_LOOKED_AT = 50


def read_turns(
    cfg: RoleplayConfig, tokenizer: Any
) -> tuple[list[RoleplayTurn], list[RoleplayTurn]]:
    """(to learn from, held out), those whose prompt fits. Raises UserError."""
    train = fitting("data.train", load_train(cfg.data), cfg, tokenizer)
    held_out = held_out_turns(cfg, tokenizer)
    if told := in_both(train, held_out):
        log.warning("%s", told)
    missing = ", ".join(f"{field} {count}" for field, count in untold(train).items())
    if missing:
        log.warning(
            "data.train: of %d turns some do not tell what rewards read, and are neutral there: %s",
            len(train),
            missing,
        )
    return train, held_out


def held_out_turns(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Those to evaluate on, whose prompt fits; none where the config names none."""
    turns = load_held_out(cfg.data, cfg.eval.eval_limit)
    return fitting("data.eval", turns, cfg, tokenizer) if turns else []


def fitting(
    key: str, turns: Sequence[RoleplayTurn], cfg: RoleplayConfig, tokenizer: Any
) -> list[RoleplayTurn]:
    """Those whose prompt has at most data.max_prompt_length tokens. Raises UserError if none
    is left, or where the config refuses the others."""
    limit = cfg.data.max_prompt_length
    kept, overlong = fitting_turns(turns, tokenizer, cfg.chat, limit)
    if overlong:
        told = (
            f"{key}: {len(overlong)} of {len(turns)} prompts have more than "
            f"data.max_prompt_length {limit} tokens (up to {max(n for _, n in overlong)})"
        )
        if cfg.data.overlong_prompts == "refuse" or not kept:
            raise UserError(f"{told}: shorten their context (prepare --context), or raise it")
        log.warning("%s, and are left out", told)
    return kept


def chat_findings(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]
) -> list[Finding]:
    """What the template check finds on the first turns with a reference, as they would be learned
    by SFT before, and are sampled here."""
    from transformers import GenerationConfig

    conversations = [
        [*turn.prompt, {"role": "assistant", "content": turn.reference}]
        for turn in turns
        if turn.reference
    ][:_LOOKED_AT]
    settings = None
    folder = model_folder(str(cfg.policy.path), cfg.policy.revision)
    if (Path(folder) / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder)
    return check_template(tokenizer, conversations, cfg.chat, settings, learned="last")


def check_chat(cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]) -> None:
    """Raise UserError at a fault of the chat template, or warn, as start.template_check says."""
    hint = "python -m trainer template-check shows all; start.template_check: warn goes on"
    refuse_faults(chat_findings(cfg, tokenizer, turns), cfg.start.template_check, hint)


def try_rewards(turns: Sequence[RoleplayTurn]) -> dict[str, float]:
    """Every reward function on two rows, before anything is loaded for them: their means. Raises
    what they raise, and UserError where one gives no number for each."""
    two = list(turns[:2])
    columns = columns_of(two)
    prompts = columns.pop("prompt")
    texts = [turn.reference or turn.user_turn for turn in two]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    means = {}
    for reward in REWARDS:
        values = reward.function(prompts=prompts, completions=completions, **columns)
        if len(values) != len(two) or not all(map(math.isfinite, values)):
            raise UserError(f"{reward.name}: {values} is not a number for each of {len(two)} rows")
        means[reward.name] = sum(values) / len(values)
    return means


def sampled_ratio(
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    cfg: RoleplayConfig,
    device: torch.device,
) -> float | None:
    """Share of replies, sampled as in training for the first start.sample_prompts turns, that are
    cut by their limit. Warns where all are."""
    chosen = list(turns[: cfg.start.sample_prompts])
    if not chosen:
        return None
    with undisturbed(model, cfg.misc.seed), autocast(device, cfg.misc.dtype):
        replies = sample_replies(
            prompt_ids(chosen, tokenizer, cfg), model, tokenizer, cfg, evaluation=False
        )
    ratio = sum(not reply.ended for reply in replies) / len(replies)
    if ratio == 1.0:
        log.warning(
            "all of %d sampled replies are cut by grpo.max_completion_length %d (clipped_ratio "
            "1.0): the policy does not end its turns; look with: python -m trainer template-check "
            "--model %s --data %s",
            len(replies),
            cfg.grpo.max_completion_length,
            cfg.policy.path,
            cfg.data.train,
        )
    return ratio
