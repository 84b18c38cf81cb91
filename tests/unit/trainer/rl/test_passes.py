"""Check how the sequences of an optimizer step are shared over processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rl.forward import micro_batches
from trainer.rl.update import own_micro_batches, padded_tokens, share_sequences

LENGTHS = st.lists(st.integers(2, 3000), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 9000), st.booleans(), st.randoms())
def test_every_sequence_is_in_one_pass_of_one_process(
    lengths: list[int], ranks: int, max_tokens: int, in_step: bool, random: Any
) -> None:
    chosen = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    shares = share_sequences(lengths, chosen, max_tokens, ranks, passes_in_step=in_step)
    batches = [batch for share in shares for batch in share]
    assert sorted(index for batch in batches for index in batch) == sorted(chosen)
    assert len(shares) == ranks
    for batch in batches:
        assert len(batch) == 1 or padded_tokens(lengths, batch) <= max_tokens
    for share in shares if ranks > 1 else ():
        sizes = [padded_tokens(lengths, batch) for batch in share]
        assert sizes == sorted(sizes, reverse=True)
    assert sum(map(bool, shares)) == min(ranks, len(chosen))


@given(LENGTHS, st.integers(1, 9000), st.randoms())
def test_one_process_makes_the_passes_of_micro_batches(
    lengths: list[int], max_tokens: int, random: Any
) -> None:
    chosen = random.sample(range(len(lengths)), len(lengths))
    (share,) = share_sequences(lengths, chosen, max_tokens, 1)
    assert share == list(micro_batches(lengths, max_tokens, chosen))


@given(LENGTHS, st.integers(2, 12), st.integers(1, 9000), st.booleans())
def test_every_process_makes_the_same_number_of_passes(
    lengths: list[int], ranks: int, max_tokens: int, is_sharded: bool
) -> None:
    chosen = range(len(lengths))
    all_batches = []
    for rank in range(ranks):
        world: Any = SimpleNamespace(rank=rank, size=ranks, is_sharded=is_sharded)
        all_batches.append(own_micro_batches(lengths, chosen, max_tokens, world))
    assert len({len(batches) for batches in all_batches}) == 1
    rows = [index for batches in all_batches for batch in batches for index in batch]
    assert sorted(rows) == list(chosen)
    if is_sharded:  # as few as the padded tokens of a pass allow
        needed = math.ceil(len(list(micro_batches(lengths, max_tokens))) / ranks)
        assert len(all_batches[0]) <= needed


@given(LENGTHS, st.integers(2, 12), st.integers(1, 9000))
def test_processes_differ_by_one_pass_at_most(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    """Check that each process without its shortest pass has no more tokens than any other."""
    shares = share_sequences(lengths, range(len(lengths)), max_tokens, ranks)
    sizes = [[padded_tokens(lengths, batch) for batch in share] for share in shares]
    assert max(sum(share[:-1]) for share in sizes) <= min(map(sum, sizes))


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "shares"),
    [
        # One sequence a pass: long ones with short ones.
        ([8, 7, 6, 5, 4, 3], 1, [[[0], [3], [4]], [[1], [2], [5]]]),
        # Room for all in a pass: still both have one.
        ([8, 7, 6, 5], 100, [[[1, 0]], [[3, 2]]]),
        # More processes than sequences.
        ([8], 100, [[[0]], []]),
    ],
)
def test_a_small_step(lengths: list[int], max_tokens: int, shares: list[list[list[int]]]) -> None:
    assert share_sequences(lengths, range(len(lengths)), max_tokens, 2) == shares


def test_passes_in_step_are_of_similar_length() -> None:
    """Check that a long pass waits for no short one: the sum of the longest of each is least."""
    lengths = [100, 90, 20, 10, 10, 10]
    shares = share_sequences(lengths, range(6), 1, 2, passes_in_step=True)
    assert shares == [[[0], [3], [4]], [[1], [2], [5]]]
