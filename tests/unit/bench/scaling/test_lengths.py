"""The lengths that are read from episodes."""

from __future__ import annotations

from bench.scaling.lengths import _runs


def test_runs_of_own_and_other_tokens_are_counted():
    mask = [True, True, False, False, False, True]
    assert list(_runs(mask)) == [(True, 2), (False, 3), (True, 1)]
