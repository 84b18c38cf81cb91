"""Rows -> a batch: padded on the right, with the images that the ids hold places for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scorekit.errors import UserError


class Collator:
    """What the trainer's data loader calls. processor: of images; None: rows have none. image_id:
    the id that stands for a piece of an image."""

    def __init__(self, pad_id: int, processor: Any = None, image_id: int | None = None) -> None:
        self.pad_id, self.processor, self.image_id = pad_id, processor, image_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """input_ids, attention_mask, labels, [B, L], and what the images become (concatenated in
        the order of the rows, and in each row in that of its list). Raises UserError where an image
        cannot be read or has another number of pieces than its row has places."""
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": self._padded(rows, "input_ids", self.pad_id, length),
            "attention_mask": torch.tensor(
                [[1] * len(r["input_ids"]) + [0] * (length - len(r["input_ids"])) for r in rows]
            ),
            "labels": self._padded(rows, "labels", -100, length),
        }
        if self.image_id is not None:
            # transformers takes the positions of images from it, and is silently wrong without.
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image_id).long()
        images = [read for row in rows for read in self._images(row)]
        for name in images[0] if images else ():
            batch[name] = torch.cat([read[name] for read in images])
        return batch

    @staticmethod
    def _padded(rows: Sequence[dict[str, Any]], key: str, filling: int, length: int) -> Tensor:
        return torch.tensor([row[key] + [filling] * (length - len(row[key])) for row in rows])

    def _images(self, row: dict[str, Any]) -> list[dict[str, Tensor]]:
        """What the images of a row become, one by one; their pieces are as many as its places."""
        from PIL import Image

        found, pieces = [], 0
        for path in row.get("pictures") or ():
            try:
                with Image.open(path) as opened:
                    picture = opened.convert("RGB")
                read = dict(self.processor(images=[picture], return_tensors="pt"))
            except (OSError, ValueError) as error:
                raise UserError(f"{row['where']}: {path}: cannot be read: {error}") from None
            found.append(read)
            if "image_grid_thw" in read:
                pieces += int(read["image_grid_thw"].prod()) // self.processor.merge_size**2
        places = row["input_ids"].count(self.image_id)
        if pieces and pieces != places:
            raise UserError(
                f"{row['where']}: its images are {pieces} pieces, but its input_ids have {places} "
                "places for them: give the images in the size in which the model saw them"
            )
        return found
