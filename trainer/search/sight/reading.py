"""Pictures as a policy that sees reads them: how many ids each stands for, and its patches.

Pictures come resized already (trainer/search/sight/pictures.py), so that its own processor, a vLLM
server's and the store have the same pixels; a processor that would resize them again is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scorekit.errors import UserError
from trainer.search.sight.config import SightConfig
from trainer.search.sight.pictures import PictureError, read_picture
from trainer.search.sight.views import Shown


@dataclass(frozen=True, slots=True, eq=False)
class SeenPicture:
    """A picture of an episode as `trainer.rl.forward.Image`; patches are made when asked for."""

    png: bytes
    grid: tuple[int, int, int]
    reader: PictureReader

    @property
    def patches(self) -> Tensor:
        """[P, D], as the model's image processor gives them."""
        return self.reader.patches(self)


class PictureReader:
    """For Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and what reads pictures as they do.

    processor: the model's image processor. config: the model's. image_id: stands for a merged
    square of patches. never: ids that must not be sampled, since the model would look for a picture
    behind them. Raises UserError where the sizes of `sight` are none of this model's.
    """

    def __init__(self, processor: Any, config: Any, sight: SightConfig) -> None:
        self._processor = processor
        try:
            self._patch, self._merge = int(processor.patch_size), int(processor.merge_size)
            least, most = (processor.size[key] for key in ("shortest_edge", "longest_edge"))
            self.image_id = int(config.image_token_id)
            names = ("image", "video", "vision_start", "vision_end")
            self.never = [int(getattr(config, f"{name}_token_id")) for name in names]
        except (AttributeError, KeyError, TypeError):
            raise UserError(
                f"policy.path: a {config.model_type} reads pictures in another way than Qwen2-VL, "
                "Qwen2.5-VL and Qwen3-VL, which are known here: take one of these, or "
                "episode.observation text"
            ) from None
        factor = self._patch * self._merge
        if sight.factor != factor:
            raise UserError(
                f"sight.factor is {sight.factor}, but the policy merges its patches to squares of "
                f"{factor} pixels: set {factor}"
            )
        if sight.min_pixels < least or sight.max_pixels > most:
            raise UserError(
                f"sight.min_pixels and max_pixels, {sight.min_pixels} to {sight.max_pixels}, must "
                f"lie within the policy's own limits, {least} to {most}: else it resizes pictures "
                "again, and boxes are of another frame"
            )

    def ids(self, shown: Shown) -> int:
        """How many ids a picture stands for, without those around it."""
        _, height, width = self._grid(shown)
        return int(height * width // self._merge**2)

    def read(self, shown: Shown) -> SeenPicture:
        """The picture as the engine takes it."""
        return SeenPicture(shown.png, self._grid(shown), self)

    def patches(self, seen: SeenPicture) -> Tensor:
        """Of one. Raises PictureError where the processor has resized it after all."""
        read = self._processor(images=[read_picture(seen.png)], return_tensors="pt")
        if tuple(read["image_grid_thw"][0].tolist()) != seen.grid:
            raise PictureError("the policy's processor has resized a picture")
        patches: Tensor = read["pixel_values"]
        return patches

    def _grid(self, shown: Shown) -> tuple[int, int, int]:
        return 1, shown.view.height // self._patch, shown.view.width // self._patch


def load_reader(
    path: str, config: Any, sight: SightConfig, revision: str | None = None
) -> PictureReader | None:
    """Of the policy in `path` (revision: of a hub id); None of one that reads text alone. Raises
    UserError."""
    if getattr(config, "vision_config", None) is None:
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(path, revision=revision)
    except Exception as error:  # transformers raises half a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"policy.path: {path}: its image processor: {reason}") from None
    return PictureReader(processor, config, sight)
