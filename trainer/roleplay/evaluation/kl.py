"""The KL of a policy to its start: of next tokens along its own replies.

TRL reports a KL only if it is part of the loss (beta above 0); this one is always measured. It is
the sum over the vocabulary, KL(policy || start) at temperature 1, and no estimate from sampled
tokens: greedy replies are no sample of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy


@torch.no_grad()
def kl_to_start(
    model: Any,
    cfg: PolicyConfig,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[float | None]:
    """Return the mean KL over the tokens of each reply; None for an empty one.

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
