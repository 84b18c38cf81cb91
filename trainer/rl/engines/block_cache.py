"""A cache of keys and values that is copied once in 64 tokens, and once where rows change.

transformers' own is copied for each token: a fifth of the time of an update with short completions.
The numbers are the same to the bit. Import it late: transformers takes seconds to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

#: Columns by which the storage of a layer grows. More would take memory that short completions
#: never use.
BLOCK = 64


class BlockLayer(DynamicLayer):
    """A layer's keys and values [rows, heads, columns, size], with storage for the next columns.

    `keys` and `values` are views of that storage, or tensors that somebody has put in their place.
    """

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add columns, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_columns, num_new = self.get_seq_length(), key_states.shape[-2]
        start = self._start_with_room(num_columns, num_new)
        if start is None:
            start = 0
            old = (self.keys, self.values)
            if not num_columns:  # values may have another size than keys
                old = (key_states[:, :, :0], value_states[:, :, :0])
            capacity = capacity_for(num_columns + num_new)
            keys, values = (stacked([(states, None)], num_columns, capacity) for states in old)
            self._storage = (keys, values)
        assert self._storage is not None
        keys, values = self._storage
        first, end = start + num_columns, start + num_columns + num_new
        keys[:, :, first:end] = key_states
        values[:, :, first:end] = value_states
        self.keys, self.values = keys[:, :, start:end], values[:, :, start:end]
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor, num_columns: int) -> None:
        """Take storage [rows, heads, capacity, size] whose first columns are filled."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._storage = (keys, values)
        self.keys, self.values = keys[:, :, :num_columns], values[:, :, :num_columns]

    def _start_with_room(self, num_columns: int, num_new: int) -> int | None:
        """Return the keys' first column in the storage if new ones fit behind them, else None.

        None also where the keys are no longer a part of the storage, with all of its rows.
        """
        if self._storage is None or num_columns == 0:
            return None
        storage = self._storage[0]
        rows, heads, capacity, size = storage.shape
        start = (self.keys.data_ptr() - storage.data_ptr()) // (storage.element_size() * size)
        is_view = (
            self.keys.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            and self.keys.stride() == storage.stride()
            and self.keys.shape == (rows, heads, num_columns, size)
            and start < capacity  # else it begins with a later row
        )
        return start if is_view and start + num_columns + num_new <= capacity else None

    def reset(self) -> None:
        """Forget all columns."""
        super().reset()
        self.drop_storage()

    def drop_storage(self) -> None:
        """Free the storage, unless `keys` and `values` are views of it."""
        self._storage = None


def capacity_for(num_columns: int) -> int:
    """Return the columns of a storage for as many: whole blocks."""
    return -(-num_columns // BLOCK) * BLOCK


def stacked(
    row_groups: Sequence[tuple[Tensor, Sequence[int] | None]], num_columns: int, capacity: int
) -> Tensor:
    """Return rows of batches [rows, heads, columns, size] in one [all rows, heads, capacity, size].

    row_groups: batches with the indices of their rows, None for all.
    num_columns: columns that are filled; those of shorter batches end there, behind zeros.
    """
    counts = [len(states) if rows is None else len(rows) for states, rows in row_groups]
    first = row_groups[0][0]
    storage = first.new_empty(sum(counts), first.shape[1], capacity, first.shape[3])
    begin = 0
    for count, (states, rows) in zip(counts, row_groups, strict=True):
        part, padding = storage[begin : begin + count], num_columns - states.shape[2]
        part[:, :, :padding] = 0
        target = part[:, :, padding:num_columns]
        if rows is None:
            target.copy_(states)
        else:
            indices = torch.tensor(rows, device=states.device)
            torch.index_select(states, 0, indices, out=target)
        begin += count
    return storage


def block_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a model of this config.

    Layers that keep a window of columns or a state of another kind stay as they are.
    """
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [
        BlockLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
