"""Check that seeds are unchanged since 0.1 and distinct for each use."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any, get_args

import pytest

from scorekit.seeds import _FIXED_STREAMS, Stream, stream_seed

SEEDS, STEPS, RANKS = (0, 1, 2, 1234), range(300), range(64)
EXISTING_SEEDS = [
    (("adapters", 7), 7),
    (("order", 0, 0), 0),
    (("order", 7, 3), 7_000_024),
    (("minibatches", 7, 3), 7_000_024),
    (("sampling", 7, 3, 0), 7_000_024),
    (("sampling", 7, 3, 2), 2_006_999_898),
    (("prompt", 7_000_024, 5), 2052332045897614684),
    (("teacher", 1234, "0f" * 16, "final"), 1022073842),
]


@pytest.mark.parametrize(("key", "seed"), EXISTING_SEEDS)
def test_a_stream_keeps_its_numbers(key: tuple[Any, ...], seed: int) -> None:
    """Check stability: else resumed runs sample other prompts and cached answers are lost."""
    assert stream_seed(*key) == seed


def stream_keys(stream: str) -> list[tuple[Any, ...]]:
    """Return the keys that a run may use in a stream."""
    if stream == "adapters":
        return [()]
    if stream == "sampling":
        return list(product(STEPS[1:], RANKS))
    if stream == "prompt":  # under the seeds of `sampling`, for which this test uses a run's seed
        return [(index,) for index in range(500)]
    if stream == "teacher":
        return [
            (f"{i:032x}", stage_name) for i in range(200) for stage_name in ("prefilter", "final")
        ]
    return [(step,) for step in (STEPS if stream == "order" else STEPS[1:])]


def test_no_two_streams_of_a_run_coincide_but_those_that_are_named() -> None:
    for seed in SEEDS:
        uses_by_seed: dict[int, set[tuple[Any, ...]]] = defaultdict(set)
        for stream in (*get_args(Stream), "new", "another"):
            for key in stream_keys(stream):
                uses_by_seed[stream_seed(stream, seed, *key)].add((stream, *key))
        shared = [frozenset(uses) for uses in uses_by_seed.values() if len(uses) > 1]
        named = {
            frozenset({("order", step), ("minibatches", step), ("sampling", step, 0)})
            for step in STEPS[1:]
        }
        named |= {frozenset({("adapters",), ("order", 0)})} if seed == 0 else set()
        assert set(shared) == named


def test_a_new_stream_lies_above_all_that_stand() -> None:
    existing_seeds = [
        stream_seed(stream, seed, *key)
        for seed in SEEDS
        for stream in get_args(Stream)
        if stream in _FIXED_STREAMS
        for key in stream_keys(stream)
    ]
    new: Any = "new"
    fresh = [stream_seed(new, seed, step) for seed in SEEDS for step in STEPS]
    fresh += [stream_seed("anchors", seed, "grounded") for seed in SEEDS]
    assert max(existing_seeds) < 2**62 <= min(fresh) and max(fresh) < 2**63
    assert len(set(fresh)) == len(fresh)


def test_every_seed_fits_a_generator() -> None:
    import torch

    new: Any = "new"
    for seed in (stream_seed(new, 1, 1), stream_seed("sampling", 2**31, 10**6, 4096)):
        torch.Generator().manual_seed(seed)
