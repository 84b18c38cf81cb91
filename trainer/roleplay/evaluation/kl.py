"""How far a policy has gone from its start: the KL of next tokens along its own replies.

TRL tells a KL where it is paid for (beta above 0); this one is measured whether it is or not. It is
the sum over the vocabulary, KL(policy || start) at temperature 1, and no estimate from the tokens
that were drawn: greedy replies are no sample of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy

#: Gives the model as it was at the start, within.
Start = Callable[[], AbstractContextManager[Any]]


@contextmanager
def start_of(model: Any, cfg: PolicyConfig, device: torch.device) -> Iterator[Start]:
    """The start of a policy: what is left of it without its adapters, or, where every weight
    learns, the model of `cfg.path`, which is held within only."""
    if hasattr(model, "disable_adapter"):

        @contextmanager
        def bare() -> Iterator[Any]:
            with model.disable_adapter():
                yield model

        yield bare
        return
    whole = cfg.model_copy(update={"lora": LoraConfig(), "gradient_checkpointing": False})
    frozen, _ = load_policy(whole, device)
    yield lambda: nullcontext(frozen.requires_grad_(False))


@torch.no_grad()
def kl_to_start(
    model: nn.Module,
    start: Start,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[float | None]:
    """Of each reply, the mean over its tokens; None of one without any. One at a time: two rows of
    [T, V] in float32 are held."""
    found: list[float | None] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if not completion:
            found.append(None)
            continue
        now_TV = _logprobs(model, prompt, completion)
        with start() as first:
            then_TV = _logprobs(first, prompt, completion)
        found.append(float((now_TV.exp() * (now_TV - then_TV)).sum(-1).mean()))
    return found


def _logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Of every token at each place of the completion, [T, V]."""
    ids = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)
