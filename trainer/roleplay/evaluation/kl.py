"""The KL of a policy to its start: of next tokens along its own replies.

TRL reports a KL only if it is part of the loss (beta above 0); this one is always measured. It is
the sum over the vocabulary, KL(policy || start) at temperature 1, and no estimate from sampled
tokens: greedy replies are no sample of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy.loading import load_policy

#: Gives the model of the start, as a context manager.
Start = Callable[[], AbstractContextManager[Any]]


@contextmanager
def start_of(model: Any, cfg: PolicyConfig, device: torch.device) -> Iterator[Start]:
    """Yield the start of a policy: the policy without its adapters, or a second model.

    The second model is loaded from `cfg.path` if every weight is trained, and freed at the end.
    """
    if hasattr(model, "disable_adapter"):

        @contextmanager
        def bare() -> Iterator[Any]:
            with model.disable_adapter():
                yield model

        yield bare
        return
    config_without_adapters = cfg.model_copy(
        update={"lora": LoraConfig(), "gradient_checkpointing": False}
    )
    frozen, _ = load_policy(config_without_adapters, device)
    yield lambda: nullcontext(frozen.requires_grad_(False))


@torch.no_grad()
def kl_to_start(
    model: nn.Module,
    start: Start,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[float | None]:
    """Return the mean KL over the tokens of each reply; None for an empty one.

    Replies are computed one at a time: two [T, V] in float32 are in memory.
    """
    values: list[float | None] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if not completion:
            values.append(None)
            continue
        now_TV = _logprobs(model, prompt, completion)
        with start() as start_model:
            then_TV = _logprobs(start_model, prompt, completion)
        values.append(float((now_TV.exp() * (now_TV - then_TV)).sum(-1).mean()))
    return values


def _logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the log-probabilities of every token at each position of the completion, [T, V]."""
    ids = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)
