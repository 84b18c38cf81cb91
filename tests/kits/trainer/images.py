"""Tiny random vision models, and images for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image as PIL
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessor

from tests.kits.float64 import doubled
from trainer.rl.rollout import Rollout

PAD, EOS, IMAGE, VIDEO, START, END = 0, 1, 90, 91, 92, 93
NEVER = [IMAGE, VIDEO, START, END]
KINDS = pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
TOKENIZER = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
PATCH = 4
#: Makes the patches of an image. If its sides are multiples of 8, it is not resized.
PROCESSOR = Qwen2VLImageProcessor(
    patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=64 * 64
)


def image_ids(grid: tuple[int, int, int]) -> list[int]:
    """Return the ids of an image in a sequence."""
    return [START, *[IMAGE] * (grid[1] * grid[2] // 4), END]


@dataclass(eq=False)
class Patches:
    """An image that is its patches."""

    patches: Tensor
    grid: tuple[int, int, int]
    png: bytes = b""

    @property
    def ids(self) -> list[int]:
        """Return the image's token ids in a sequence."""
        return image_ids(self.grid)


@dataclass(eq=False)
class Picture:
    """Holds a PNG, with the patches that the processor makes of it."""

    png: bytes

    @cached_property
    def _read(self) -> Any:
        return PROCESSOR(images=[PIL.open(BytesIO(self.png))], return_tensors="pt")

    @property
    def patches(self) -> Tensor:
        """Return the patches as the processor gives them."""
        patches: Tensor = self._read["pixel_values"]
        return patches

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the grid in time, height and width."""
        time, height, width = self._read["image_grid_thw"][0].tolist()
        return time, height, width


def noise_image(height: int, width: int, seed: int) -> Picture:
    """Return an image of noise; sides in pixels."""
    numbers = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=numbers, dtype=torch.uint8)
    written = BytesIO()
    PIL.fromarray(pixels.numpy()).save(written, "PNG")
    return Picture(written.getvalue())


def noise_patches(height: int, width: int, seed: int) -> Patches:
    """Return patches of noise; sides in patches."""
    numbers = torch.Generator().manual_seed(seed)
    patches = torch.randn(height * width, 3 * 2 * PATCH**2, generator=numbers)
    return Patches(patches.double(), (1, height, width))


def tiny(kind: str, *, head: int = 16, max_positions: int = 512, spread: float = 0.2) -> nn.Module:
    """Return a random model in float64 whose weights are large enough for an image to matter.

    head: size of the text's attention heads.
    max_positions: ids that it reads.
    spread: of its weights.
    """
    import transformers

    text: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 2 * head,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
            # transformers mixes Qwen3-VL's positions whatever this says, vLLM where it is true
            **({"mrope_interleaved": True} if kind == "qwen3_vl" else {}),
        },
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 2 * head,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    classes: tuple[Any, Any]
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        classes = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    else:
        text["head_dim"] = head
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        classes = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    config = classes[0](
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    architecture: Any = classes[1]
    model = architecture(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, spread)
    doubled(model)
    return model.eval()


def rollouts() -> list[Rollout]:
    """Return rollouts: without an image, with some in the prompt, and between the policy's
    turns.
    """
    numbers = torch.Generator().manual_seed(1)

    def words(n: int) -> list[int]:
        return torch.randint(2, 90, (n,), generator=numbers).tolist()

    sampled = []
    for sizes in ([], [(2, 4)], [(4, 4), (2, 2), (4, 2)], [(2, 2), (2, 6)]):
        images = [noise_patches(h, w, seed=h * w + i) for i, (h, w) in enumerate(sizes)]
        prompt = [*words(3), *(images[0].ids if images else []), *words(2)]
        completion, mask = words(4), [True] * 4
        for shown_image in images[1:]:
            observation, turn = [*words(2), *shown_image.ids], words(5)
            completion += observation + turn
            mask += [False] * len(observation) + [True] * len(turn)
        sampled.append(
            Rollout(
                group=0,
                prompt_input_ids=prompt,
                completion_token_ids=completion,
                images=images,
                finish_reason="length",
                action_mask=mask,
            )
        )
    return sampled
