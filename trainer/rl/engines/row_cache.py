"""Keys and values of rows of different age, in one of transformers' dynamic caches.

Rows end at the same column: a shorter row has unused columns on its left, which the attention mask
hides. Attention depends on the distance between columns only (positions are given to the model
explicitly), so that columns can be added and removed on the left.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor


class RowCache:
    """Holds the keys and values of a batch of rows, and adds and removes rows.

    cache: what the model reads and extends.
    num_columns: columns that the rows have, of which sliding layers keep the last ones.
    """

    def __init__(self, config: Any) -> None:
        from trainer.rl.engines.block_cache import block_cache

        self.cache: Any = block_cache(config)

    @property
    def num_columns(self) -> int:
        """Return the number of columns, unused ones included."""
        return int(self.cache.get_seq_length())

    def append(self, other: RowCache) -> None:
        """Add the rows of another cache, which must not be used afterwards, after these."""
        num_columns = max(self.num_columns, other.num_columns)
        for layer, added in zip(self.cache.layers, other.cache.layers, strict=True):
            width = _width(layer, num_columns)
            layer.keys = _stack(layer.keys, added.keys, width)
            layer.values = _stack(layer.values, added.values, width)
            added.keys = added.values = None
            if layer.is_sliding:
                layer.cumulative_length = num_columns

    def keep_rows(self, rows: list[int]) -> None:
        """Remove all rows but these."""
        for layer in self.cache.layers:
            indices = torch.tensor(rows, device=layer.keys.device)
            layer.keys = layer.keys.index_select(0, indices)
            layer.values = layer.values.index_select(0, indices)

    def keep_columns(self, num_columns: int) -> None:
        """Remove columns on the left if there are more than this."""
        if num_columns >= self.num_columns:
            return
        for layer in self.cache.layers:
            width = _width(layer, num_columns)
            layer.keys = layer.keys[:, :, -width:]
            layer.values = layer.values[:, :, -width:]
            if layer.is_sliding:
                layer.cumulative_length = num_columns


def _width(layer: Any, num_columns: int) -> int:
    """Return the number of columns that a layer stores."""
    return min(num_columns, layer.sliding_window - 1) if layer.is_sliding else num_columns


def _stack(upper: Tensor, lower: Tensor, width: int) -> Tensor:
    """Return both batches [rows, heads, columns, size] as one, with zeros on the left."""
    rows, heads, _, size = upper.shape
    stacked = upper.new_zeros(rows + len(lower), heads, width, size)
    stacked[:rows, :, width - upper.shape[2] :] = upper
    stacked[rows:, :, width - lower.shape[2] :] = lower
    return stacked


def has_mergeable_cache(model: Any) -> bool:
    """Return whether `RowCache` can hold the model's rows.

    It cannot where a layer's state is unknown (linear attention, shared or static layers), nor
    where positions cannot be given explicitly.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer

    from trainer.rl.engines.block_cache import BlockLayer

    parameters = signature(type(model).forward).parameters
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or []
    if (
        "position_ids" not in parameters
        or cache_parameter(model) is None
        or model.config.is_encoder_decoder
        or not model._supports_default_dynamic_cache()
        or not set(layer_types) <= {"full_attention", "sliding_attention"}
        or getattr(config, "attention_chunk_size", None) is not None
    ):
        return False
    layers = RowCache(model.config).cache.layers
    return all(
        type(layer) is BlockLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1)
        for layer in layers
    )


def cache_parameter(model: Any) -> str | None:
    """Return the name of the parameter of the model's `forward` that is its cache."""
    parameters = signature(type(model).forward).parameters
    names = ("cache", "past_key_values")  # the second before transformers 5.24
    return next((name for name in names if name in parameters), None)
