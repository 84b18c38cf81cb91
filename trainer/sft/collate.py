"""Collate rows into a batch, and measure the loss on held-out rows.

A batch is padded on the right, with the images that the ids refer to. The loss is a mean over
labeled tokens, independent of the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scorekit.errors import UserError
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.runs.stats import Stats
from trainer.sft.rows import SftRow


class Collator:
    """The collate function of the trainer's data loader.

    processor: of images; None: rows have none.
    image_id: the id that stands for a part of an image.
    """

    def __init__(self, pad_id: int, processor: Any = None, image_id: int | None = None) -> None:
        self.pad_id, self.processor, self.image_id = pad_id, processor, image_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask, labels, [B, L], and the inputs of images.

        Images are concatenated in the order of the rows, and within a row in that of its list.
        Raises UserError if an image cannot be read, or if its parts do not match its row's ids.
        """
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": self._pad(rows, "input_ids", self.pad_id, length),
            "attention_mask": torch.tensor(
                [[1] * len(r["input_ids"]) + [0] * (length - len(r["input_ids"])) for r in rows]
            ),
            "labels": self._pad(rows, "labels", -100, length),
        }
        if self.image_id is not None:
            # transformers derives image positions from it; without it they are wrong, without an
            # error.
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image_id).long()
        images = [inputs for row in rows for inputs in self._images(row)]
        for name in images[0] if images else ():
            batch[name] = torch.cat([inputs[name] for inputs in images])
        return batch

    @staticmethod
    def _pad(rows: Sequence[dict[str, Any]], key: str, filling: int, length: int) -> Tensor:
        return torch.tensor([row[key] + [filling] * (length - len(row[key])) for row in rows])

    def _images(self, row: dict[str, Any]) -> list[dict[str, Tensor]]:
        """Return the inputs of a row's images. Raises UserError if they do not match its ids."""
        from scorekit.images import UnreadableImage, read_rgb

        inputs_by_image, num_parts = [], 0
        for path in row.get("pictures") or ():
            try:
                image = read_rgb(Path(path).read_bytes(), formats=None)
                inputs = dict(self.processor(images=[image], return_tensors="pt"))
            except (OSError, ValueError, UnreadableImage) as error:
                raise UserError(f"{row['where']}: {path}: cannot be read: {error}") from None
            inputs_by_image.append(inputs)
            if "image_grid_thw" in inputs:
                num_parts += int(inputs["image_grid_thw"].prod()) // self.processor.merge_size**2
        num_ids = row["input_ids"].count(self.image_id)
        if num_parts and num_parts != num_ids:
            raise UserError(
                f"{row['where']}: its images have {num_parts} parts, but its input_ids have "
                f"{num_ids} ids for them. Give the images in the size in which the model read them"
            )
        return inputs_by_image


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
