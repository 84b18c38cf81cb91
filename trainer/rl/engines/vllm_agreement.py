"""Compare log-probabilities of vLLM servers and the trainer, before a run samples from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig
from trainer.rl.engines.vllm_protocol import VLLMTurn
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import embedding_rows, unwrap_distributed
from trainer.rl.sampler import SampledCompletion

log = logging.getLogger(__name__)

#: Largest mean |log pi trainer - log pi server| of a token for the same model. Kernels and bfloat16
#: give hundredths.
MOST_GAP = 0.3


def trial_turn(model: nn.Module) -> VLLMTurn:
    """Return a turn of ids that any model has."""
    rows = min(embedding_rows(unwrap_distributed(model)), 2**15)
    gen_cfg = SamplingConfig(max_new_tokens=16, num_samples_per_prompt=4)
    return VLLMTurn([(7919 * i) % rows for i in range(1, 17)], (), gen_cfg, 0, True, -1)


def check_agreement(
    model: nn.Module,
    prompt: Sequence[int],
    completions_by_url: Mapping[str, Sequence[SampledCompletion]],
    banned_token_ids: Sequence[int],
) -> None:
    """Raise UserError if the log-probabilities of a server are those of another model.

    All completions are read in one pass, so that processes that share weights make as many passes.
    """
    completions = [c for group in completions_by_url.values() for c in group]
    with torch.no_grad():
        logprobs_BT, _, mask_BT = completion_logprobs(
            model,
            [list(prompt)] * len(completions),
            [completion.token_ids for completion in completions],
            1.0,
            0,
            banned_token_ids=banned_token_ids,
        )
    trainer_rows = [row[mask].cpu() for row, mask in zip(logprobs_BT, mask_BT, strict=True)]
    first = 0
    for url, group in completions_by_url.items():
        trainer_logprobs = torch.cat(trainer_rows[first : first + len(group)])
        first += len(group)
        server_logprobs = torch.tensor([value for c in group for value in c.logprobs or ()])
        gap = (trainer_logprobs - server_logprobs).abs().mean().item()
        if gap > MOST_GAP:
            raise UserError(
                f"generation.vllm.url: {url} serves another model than the policy: their "
                f"log-probabilities differ by {gap:.2f} a token. Start it with policy.path"
            )
        log.info("%s and trainer differ by %.4f in a token's log-probability", url, gap)
