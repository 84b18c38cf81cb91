"""Evaluate a policy: a reply to each held-out turn, with its rewards and other stats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scorekit.rewards.rules import chrf
from trainer.chat.render import render
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy.devices import autocast
from trainer.rl.sampler import SampledCompletion, preserve_rng_state
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.evaluation.diagnostics import copied, repeated
from trainer.roleplay.evaluation.kl import kl_to_start
from trainer.roleplay.evaluation.stats import compute_stats
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import explain_all, total
from trainer.roleplay.turn import COLUMNS, RoleplayTurn

_SEED = 0  # of replies that are sampled


@dataclass(slots=True)
class RoleplayReport:
    """An evaluation.

    stats: means (evaluation/stats.py), by their keys.
    examples: a line of the dump for each turn.
    """

    stats: dict[str, Any]
    examples: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A sampled reply.

    ids: as sampled, with the stop id if there is one.
    text: without it.
    """

    ids: list[int]
    text: str
    is_complete: bool


def evaluate_policy(
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    cfg: RoleplayConfig,
    device: torch.device,
    *,
    kl: bool,
    world: DistributedContext | None = None,
) -> RoleplayReport:
    """Answer each turn once and score the replies.

    The same policy gives the same replies, also at a temperature above 0, and the caller's random
    state does not change.
    kl: also measure the KL to the start (which `cfg.policy` defines).
    world: the processes that share the turns; None: this one answers all. If they share the
    weights, each answers all turns, since they have to make the same passes. The main one scores.
    Raises what the rewards raise.
    """
    started = time.monotonic()
    shares = world is not None and not world.is_sharded
    own_turns = world.own_block(turns) if world is not None and shares else turns
    prompts = prompt_ids(own_turns, tokenizer, cfg) if own_turns else []
    with preserve_rng_state(model, _SEED), autocast(device, cfg.misc.dtype):
        replies = sample_replies(prompts, model, tokenizer, cfg, evaluation=True)
        kl_values: list[float | None] = [None] * len(own_turns)
        if kl:
            completions = [reply.ids for reply in replies]
            kl_values = kl_to_start(model, cfg.policy, device, prompts, completions)
    answers = list(zip(replies, kl_values, strict=True))
    if world is None:
        lines = _lines(turns, answers, cfg.reward)
    else:
        all_answers = world.gather(answers) if shares else answers
        lines = world.from_main(lambda: _lines(turns, all_answers, cfg.reward))
    return RoleplayReport(compute_stats(lines) | {"seconds": time.monotonic() - started}, lines)


def _lines(
    turns: Sequence[RoleplayTurn],
    answers: Sequence[tuple[SampledReply, float | None]],
    cfg: RewardConfig,
) -> list[dict[str, Any]]:
    """Return a line for each turn. answers: replies, and their KL to the start."""
    scored = score_lines(turns, [reply for reply, _ in answers], cfg)
    return [{**line, "kl_start": kl} for line, (_, kl) in zip(scored, answers, strict=True)]


def prompt_ids(
    turns: Sequence[RoleplayTurn], tokenizer: Any, cfg: RoleplayConfig
) -> list[list[int]]:
    """Return the prompts as the policy reads them. Raises UserError if the template refuses
    one."""
    texts = [render(tokenizer, turn.prompt, cfg.chat, generation_prompt=True) for turn in turns]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def sample_replies(
    prompts: Sequence[Sequence[int]],
    model: nn.Module,
    tokenizer: Any,
    cfg: RoleplayConfig,
    *,
    evaluation: bool,
) -> list[SampledReply]:
    """Return one reply for each prompt, sampled in this process as in training or in an
    evaluation."""
    sampler = GenerateSampler(model, tokenizer)
    sampled = sampler.sample(prompts, cfg.sampling(evaluation=evaluation), with_logprobs=False)
    completions: dict[int, SampledCompletion] = {index: samples[0] for index, samples in sampled}
    return [
        SampledReply(
            ids := completions[index].token_ids,
            tokenizer.decode(ids, skip_special_tokens=True),
            bool(ids) and ids[-1] in sampler.stops,
        )
        for index in range(len(prompts))
    ]


def score_lines(
    turns: Sequence[RoleplayTurn], replies: Sequence[SampledReply], cfg: RewardConfig
) -> list[dict[str, Any]]:
    """Return a line for each reply: its text, its rewards with reasons, and other stats."""
    lines = []
    explained = explain_all(turns, [reply.text for reply in replies])
    for turn, reply, scored in zip(turns, replies, explained, strict=True):
        lines.append(
            {
                "id": turn.id,
                "scenario": turn.scenario,
                "user": turn.user_turn,
                "completion": reply.text,
                **{name: getattr(turn, name) for name in COLUMNS},
                "reward": total(scored, cfg),
                "rewards": {name: score.value for name, score in scored.items()},
                "components": {
                    k: v for score in scored.values() for k, v in score.components.items()
                },
                "reasons": {name: list(score.reasons) for name, score in scored.items()},
                "tokens": len(reply.ids),
                "finish_reason": "eos" if reply.is_complete else "length",
                "characters": len(reply.text),
                "chrf": chrf({"mt": reply.text, "ref": turn.reference}),
                "copied_user": copied(reply.text, turn.user_turn),
                "copied_reference": copied(reply.text, turn.reference),
                "repeated": repeated(reply.text),
            }
        )
    return lines
