"""Check which evaluation of a run is selected as best."""

from __future__ import annotations

import pytest

from trainer.runs.trl.run import is_best


@pytest.mark.parametrize(
    ("rating", "earlier", "best"),
    [
        (0.5, [], True),
        (0.5, [0.4, 0.5], True),
        (0.5, [0.6], False),
        (None, [], False),
        (None, [-0.5], False),
        (-0.5, [None], True),
        (-0.5, [None, -0.6], True),
    ],
)
def test_an_evaluation_without_a_rating_is_no_zero(rating, earlier, best):
    assert is_best(rating, earlier) == best
