"""The sizes of vision models, as their published config.json files have them.

The hub was not in reach when this was written. Each number was read in public code that quotes the
file: Qwen3-VL-2B in a test of a Rust server for WeVisDoc, Qwen3-VL-4B in a training tool of
diffusion models (QWEN3_VL_4B_INSTRUCT_CONFIG), Qwen2.5-VL-3B in a report that prints the file, the
layers of Qwen2.5-VL-7B in acproject/duorou (docs/qwen2.5vl_graph.md). Heads of the 7B are those of
Qwen2-7B, whose text model it is.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from scorekit.errors import UserError

#: Ids of the tokenizer that all of them share.
IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
END_OF_TURN, END_OF_TEXT = 151645, 151643

_QWEN3_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
_QWEN3_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN25_TEXT: dict[str, Any] = {
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    },
}
_QWEN25_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model.

    kind: model type of transformers.

    text, vision: its two sections.
    template: TRL's name of its chat template.
    pixels: least and largest area that its image processor takes.
    mean, std: of its pixels.
    """

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any]
    template: str
    pixels: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Return the side of the square of pixels that becomes one token."""
        return int(self.vision["patch_size"] * self.vision["spatial_merge_size"])


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> Sizes:
    text = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
    }
    return Sizes(
        "qwen3_vl",
        _QWEN3_TEXT | text,
        _QWEN3_VISION | {"out_hidden_size": hidden},
        "qwen3_vl",
        (65536, 16777216),
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    )


def _qwen25(hidden: int, inner: int, layers: int, heads: int, **text: Any) -> Sizes:
    text |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Sizes(
        "qwen2_5_vl",
        _QWEN25_TEXT | text,
        _QWEN25_VISION | {"out_hidden_size": hidden},
        "qwen2_5_vl",
        (3136, 12845056),
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    )


MODELS = {
    "Qwen3-VL-2B": _qwen3(2048, 6144, 28, 16),
    "Qwen3-VL-4B": _qwen3(2560, 9728, 36, 32),
    "Qwen2.5-VL-3B": _qwen25(
        2048, 11008, 36, 16, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-VL-7B": _qwen25(
        3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False
    ),
}


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a model. Raises UserError if none has this name."""
    if name not in MODELS:
        raise UserError(f"{name}: no such model. Choose one of {', '.join(MODELS)}")
    return MODELS[name]


def smaller(sizes: Sizes, hidden: int, layers: int) -> Sizes:
    """Return a model of the same kind that fits a test: fewer and narrower layers.

    hidden: of the text, a multiple of 128.
    layers: of the text, and of the vision tower.
    """
    text, vision = deepcopy(sizes.text), deepcopy(sizes.vision)
    heads = max(1, hidden // 128)
    text |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 1}
    vision |= {"depth": layers, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    vision["out_hidden_size"] = hidden
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [0]
    else:
        vision["fullatt_block_indexes"] = [layers - 1]
    return Sizes(sizes.kind, text, vision, sizes.template, sizes.pixels, sizes.mean, sizes.std)
