"""Evaluate a policy: a reply to each held-out turn, with its rewards and other stats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scorekit.errors import UserError
from scorekit.rewards.rules import chrf
from trainer.chat.render import render, use_template
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import load_policy, load_tokenizer
from trainer.rl.sampler import SampledCompletion, preserve_rng_state
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.evaluation.diagnostics import copied_share, repeated_share
from trainer.roleplay.evaluation.stats import compute_stats
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import explain_all, total
from trainer.roleplay.turn import COLUMNS, RoleplayTurn
from trainer.runs.checkpoints.adapters import resolve_base_model

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
    """Return a line for each turn.

    answers: replies, and their KL to the start.
    """
    scored = score_lines(turns, [reply for reply, _ in answers], cfg)
    return [{**line, "kl_start": kl} for line, (_, kl) in zip(scored, answers, strict=True)]


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
                "copied_user": copied_share(reply.text, turn.user_turn),
                "copied_reference": copied_share(reply.text, turn.reference),
                "repeated": repeated_share(reply.text),
            }
        )
    return lines


@torch.no_grad()
def kl_to_start(
    model: Any,
    cfg: PolicyConfig,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[float | None]:
    """Return the mean KL over the tokens of each reply; None for an empty one.

    TRL reports a KL only if it is part of the loss (beta above 0); this one is always measured. It
    is the sum over the vocabulary, KL(policy || start) at temperature 1, of next tokens along the
    replies, and no estimate from sampled tokens: greedy replies are no sample of the policy.

    The start is the policy without its adapters. If every weight is trained, it is a second model
    from `cfg.path`, which is freed at the end. Replies are computed one at a time: two [T, V] in
    float32 are in memory.
    """
    start, as_start = model, getattr(model, "disable_adapter", None)
    if as_start is None:
        changes = {"lora": LoraConfig(), "gradient_checkpointing": False}
        start, _ = load_policy(cfg.model_copy(update=changes), device)
        as_start = nullcontext
    values: list[float | None] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if not completion:
            values.append(None)
            continue
        now_TV = _logprobs(model, prompt, completion)
        with as_start():
            then_TV = _logprobs(start, prompt, completion)
        values.append(float((now_TV.exp() * (now_TV - then_TV)).sum(-1).mean()))
    return values


def _logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the log-probabilities of every token at each position of the completion, [T, V]."""
    ids = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


# -- prompts and replies, in training too ----------------------------------------------------------


def open_tokenizer(cfg: RoleplayConfig) -> Any:
    """Return the policy's tokenizer, with the config's template. Raises UserError."""
    if cfg.policy.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    base, _ = resolve_base_model(cfg.policy)  # adapters without a tokenizer use their base model's
    tokenizer = use_template(load_tokenizer(base), cfg.chat)
    # The inputs of a decoder; `generate` refuses others, and a folder may not define them
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


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
