"""The loss on held-out rows: per labeled token, independent of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.runs.stats import Stats
from trainer.sft.collate import Collator
from trainer.sft.rows import SftRow


@torch.no_grad()
def held_out_stats(
    model: Any,
    rows: Sequence[SftRow],
    collator: Collator,
    batch_size: int,
    dtype: str,
    world: DistributedContext,
) -> Stats:
    """Return loss and token accuracy on rows.

    loss: mean of -log p of the labeled tokens.
    token_accuracy: share of them that are the most likely token.
    model: as TRL has patched it, so that it returns the log-probabilities of the labels.
    world: the processes that share the rows. If they share the weights, each takes all rows, since
    they have to make the same passes.
    """
    if not world.is_sharded:
        rows = world.own_block(rows)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    loss = right = count = 0.0
    for begin in range(0, len(rows), batch_size):
        batch = collator(
            [
                {
                    "input_ids": row.ids,
                    "labels": row.labels,
                    "pictures": row.images,
                    "where": row.location,
                }
                for row in rows[begin : begin + batch_size]
            ]
        )
        inputs = {name: value.to(device) for name, value in batch.items()}
        with autocast(device, dtype):
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        loss -= outputs.log_probs.double().sum().item()
        right += outputs.is_top1.sum().item()
        count += outputs.label_mask.sum().item()
    model.train(training)
    sums = {"loss": loss, "right": right, "tokens": count}
    if not world.is_sharded:
        sums = world.sum(sums)
    count = sums["tokens"]
    return {
        "loss": sums["loss"] / count,
        "token_accuracy": sums["right"] / count,
        "tokens": int(count),
    }
