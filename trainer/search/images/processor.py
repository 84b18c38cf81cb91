"""Count the ids of an image for a policy, and compute its patches.

Images are resized already (trainer/search/images/image_data.py), so the policy's processor, a vLLM
server and the store have the same pixels. A processor that would resize them again is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scorekit.errors import UserError
from trainer.search.config import SightConfig
from trainer.search.images.image_data import ImageError, read_image
from trainer.search.images.views import ShownImage


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """An image of an episode as `trainer.rl.forward.Image`; patches are computed on access."""

    png: bytes
    grid: tuple[int, int, int]
    reader: ImageProcessor

    @property
    def patches(self) -> Tensor:
        """Return the patches [P, D] from the model's image processor."""
        return self.reader.patches(self)


@dataclass(frozen=True, slots=True, eq=False)
class StoredImage:
    """An image of another process's episode; it is read from the store on access.

    load: SHA-256 -> PNG.
    """

    sha256: str
    grid: tuple[int, int, int]
    reader: ImageProcessor
    load: Callable[[str], bytes]

    @property
    def png(self) -> bytes:
        """Return the image file. Raises UserError if it is missing or damaged."""
        return self.load(self.sha256)

    @property
    def patches(self) -> Tensor:
        """Return the patches [P, D] from the model's image processor."""
        return self.reader.patches(self)


class ImageProcessor:
    """The image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and compatible models.

    processor: the model's image processor.
    config: the model's.
    image_id: id of a merged square of patches. never: ids that must not be sampled, because the
    model would expect an image after them.
    Raises UserError if the sizes of `sight` do not fit the model.
    """

    def __init__(self, processor: Any, config: Any, sight: SightConfig) -> None:
        self._processor = processor
        try:
            self._patch, self._merge = int(processor.patch_size), int(processor.merge_size)
            smallest, largest = (processor.size[key] for key in ("shortest_edge", "longest_edge"))
            self.image_id = int(config.image_token_id)
            names = ("image", "video", "vision_start", "vision_end")
            self.banned_token_ids = [int(getattr(config, f"{name}_token_id")) for name in names]
        except (AttributeError, KeyError, TypeError):
            raise UserError(
                f"policy.path: a {config.model_type} reads images differently from Qwen2-VL, "
                "Qwen2.5-VL and Qwen3-VL. Use one of these, or set episode.observation to text."
            ) from None
        factor = self._patch * self._merge
        if sight.factor != factor:
            raise UserError(
                f"episode.sight.factor: it is {sight.factor}, but the policy merges its patches to "
                f"squares of {factor} pixels. Set {factor}."
            )
        if sight.min_pixels < smallest or sight.max_pixels > largest:
            raise UserError(
                "episode.sight: min_pixels to max_pixels "
                f"({sight.min_pixels} to {sight.max_pixels}) must be within the policy's limits "
                f"({smallest} to {largest}). Otherwise it resizes images again, and boxes have "
                "another frame."
            )

    def ids(self, image: ShownImage) -> int:
        """Return the number of ids of an image, without start and end ids."""
        _, height, width = self._grid(image)
        return int(height * width // self._merge**2)

    def read(self, image: ShownImage) -> ProcessedImage:
        """Return the image in the form of the engine."""
        return ProcessedImage(image.png, self._grid(image), self)

    def patches(self, seen: ProcessedImage | StoredImage) -> Tensor:
        """Return the patches of an image. Raises ImageError if the processor resized it."""
        encoded = self._processor(images=[read_image(seen.png)], return_tensors="pt")
        if tuple(encoded["image_grid_thw"][0].tolist()) != seen.grid:
            raise ImageError("the policy's processor has resized an image")
        patches: Tensor = encoded["pixel_values"]
        return patches

    def _grid(self, image: ShownImage) -> tuple[int, int, int]:
        return 1, image.view.height // self._patch, image.view.width // self._patch


def load_reader(
    path: str, config: Any, sight: SightConfig, revision: str | None = None
) -> ImageProcessor | None:
    """Return the image processor of the policy in `path`; None if it reads only text.

    revision: of a hub id. Raises UserError.
    """
    if getattr(config, "vision_config", None) is None:
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(path, revision=revision)
    except Exception as error:  # transformers raises half a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"policy.path: {path}: its image processor cannot be loaded: {reason}"
        ) from None
    return ImageProcessor(processor, config, sight)
