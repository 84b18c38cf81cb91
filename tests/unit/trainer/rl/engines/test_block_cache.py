"""Check that a cache with storage for the next columns holds what transformers' own holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trainer.rl.engines import block_cache as module
from trainer.rl.engines.block_cache import BLOCK, BlockLayer, block_cache, stacked

ROWS = 3
CHANGES = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 80)),
    st.tuples(st.just("crop"), st.integers(1, 20)),
    st.tuples(st.just("select"), st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)),
    st.tuples(st.just("last columns"), st.integers(1, 70)),
    st.tuples(st.just("first rows"), st.integers(1, ROWS)),
    st.tuples(st.just("reset"), st.none()),
)


def states(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, 2, columns, 4)


def change(layer: Any, name: str, value: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    if name == "update":
        returned = layer.update(keys, values)
        assert returned[0] is layer.keys and returned[1] is layer.values
    elif name == "crop":
        layer.crop(-min(value, max(0, layer.get_seq_length() - 1)))
    elif name == "select":
        layer.batch_select_indices(torch.tensor([i % keys.shape[0] for i in value]))
    elif name == "last columns" and layer.get_seq_length():
        layer.keys, layer.values = layer.keys[:, :, -value:], layer.values[:, :, -value:]
    elif name == "first rows" and layer.get_seq_length():
        layer.keys, layer.values = layer.keys[:value], layer.values[:value]
    elif name == "reset":
        layer.reset()


@given(st.lists(CHANGES, max_size=12))
@example([("update", 9), ("last columns", 4), ("update", 2)])
@example([("update", 9), ("first rows", 1), ("update", 2)])
@example([("update", BLOCK), ("select", [2, 0]), ("update", 1)])
def test_a_layer_holds_what_transformers_own_holds(changes: list[tuple[str, Any]]) -> None:
    block_layer, rows = BlockLayer(), ROWS
    dynamic_layer: Any = DynamicLayer()
    for name, value in changes:
        columns = value if name == "update" else 1
        keys, values = states(rows, columns), states(rows, columns)
        for layer in (block_layer, dynamic_layer):
            change(layer, name, value, keys, values)
        assert block_layer.get_seq_length() == dynamic_layer.get_seq_length()
        if dynamic_layer.get_seq_length():
            assert torch.equal(block_layer.keys, dynamic_layer.keys) and torch.equal(
                block_layer.values, dynamic_layer.values
            )
            rows = dynamic_layer.keys.shape[0]
        else:
            rows = ROWS


def test_what_somebody_took_out_does_not_change() -> None:
    layer = BlockLayer()
    first, _ = layer.update(states(2, 5), states(2, 5))
    copy = first.clone()
    for _ in range(BLOCK):
        layer.update(states(2, 1), states(2, 1))
    assert torch.equal(first, copy)


def count_copies(monkeypatch: Any) -> list[int]:
    """Return a list to which each copy of a layer adds its filled columns, twice."""
    copies: list[int] = []
    stacked = module.stacked

    def counted(row_groups: Any, num_columns: int, capacity: int) -> torch.Tensor:
        copies.append(num_columns)
        return stacked(row_groups, num_columns, capacity)

    monkeypatch.setattr(module, "stacked", counted)
    return copies


def test_a_layer_is_copied_once_in_a_block_of_tokens(monkeypatch: Any) -> None:
    copies = count_copies(monkeypatch)
    layer = BlockLayer()
    for columns in [10] + [1] * 3 * BLOCK:
        layer.update(states(2, columns), states(2, columns))
    assert copies[::2] == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert layer._storage is not None and layer._storage[0].shape[2] == 4 * BLOCK


def test_columns_are_removed_on_the_left_without_a_copy(monkeypatch: Any) -> None:
    copies = count_copies(monkeypatch)
    layer = BlockLayer()
    layer.update(states(2, 20), states(2, 20))
    layer.keys, layer.values = layer.keys[:, :, -15:], layer.values[:, :, -15:]
    expected = layer.keys.clone()
    added = states(2, BLOCK - 20), states(2, BLOCK - 20)
    keys, values = layer.update(*added)
    assert torch.equal(keys, torch.cat([expected, added[0]], 2)) and values.shape == keys.shape
    assert copies[::2] == [0]
    layer.update(states(2, 1), states(2, 1))
    assert copies[::2] == [0, BLOCK - 5]


@pytest.mark.parametrize(("heads", "size"), [(2, 3), (1, 1), (3, 6)])
def test_values_may_have_another_size_than_keys(heads: int, size: int) -> None:
    """DeepSeek's keys and values have."""
    layer, expected = BlockLayer(), torch.empty(2, heads, 0, size)
    for columns in (5, 1, BLOCK):
        values = torch.randn(2, heads, columns, size)
        expected = torch.cat([expected, values], 2)
        keys, stored = layer.update(states(2, columns), values)
        assert torch.equal(stored, expected) and keys.shape == (2, 2, expected.shape[2], 4)


def test_rows_of_batches_end_together_behind_zeros() -> None:
    long, short = states(3, 5), states(2, 2)
    storage = stacked([(long, [2, 0]), (short, None), (short, [1, 1])], 6, 8)
    assert storage.shape == (6, 2, 8, 4)
    assert torch.equal(storage[:2, :, 1:6], long[[2, 0]]) and not storage[:2, :, :1].any()
    assert torch.equal(storage[2:, :, 4:6], short[[0, 1, 1, 1]]) and not storage[2:, :, :4].any()


def test_layers_of_another_kind_stay() -> None:
    gemma = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    assert {type(layer) for layer in block_cache(gemma).layers} == {DynamicSlidingWindowLayer}
    assert {type(layer) for layer in block_cache(LlamaConfig()).layers} == {BlockLayer}
