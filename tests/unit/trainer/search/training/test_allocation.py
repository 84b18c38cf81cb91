"""Check how an update's episodes are shared out over its questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from tests.kits.trainer.searching.finished import episode, question
from trainer.search.records import EpisodeReward, Question, Trajectory
from trainer.search.training.online_budget import Results, SuccessBelief, affordable, allocate

#: Pairs of parameters from ignorance to certainty.
BELIEFS = [
    SuccessBelief(*parameters)
    for parameters in ((1, 1), (0.2, 5.0), (30.0, 1.5), (4.0, 4.0), (0.01, 9.0), (1e6, 1e6))
]


def nearly_certain(p: float) -> SuccessBelief:
    """Return a belief that is nearly certain of p."""
    return SuccessBelief(1e9 * p, 1e9 * (1 - p))


def best_by_trying(
    beliefs: Sequence[SuccessBelief], total: int, fewest: int, largest: int
) -> float:
    """Return the largest sum of spread over all ways to share out."""
    return max(
        math.fsum(belief.spread(n) for belief, n in zip(beliefs, counts, strict=True))
        for counts in product(range(fewest, largest + 1), repeat=len(beliefs))
        if sum(counts) == total
    )


def test_spread_of_a_known_probability_is_the_closed_form() -> None:
    for p, n in product((0.05, 0.5, 0.9), (1, 2, 8)):
        # the variance of the belief, p (1 - p) / 1e9, moves the mean of p^n by less than this
        assert nearly_certain(p).spread(n) == pytest.approx(1 - p**n - (1 - p) ** n, abs=1e-7)


def test_spread_of_an_unknown_probability_is_its_mean() -> None:
    for n in (1, 2, 3, 10):  # the mean of p^n over the uniform distribution is 1 / (n + 1)
        assert SuccessBelief(1, 1).spread(n) == pytest.approx(1 - 2 / (n + 1))


def test_the_gain_is_the_step_of_the_spread_and_never_rises() -> None:
    for belief in BELIEFS:
        gains = [belief.gain(n) for n in range(1, 12)]
        steps = [belief.spread(n + 1) - belief.spread(n) for n in range(1, 12)]
        assert gains == pytest.approx(steps, abs=1e-12)
        assert all(later <= gain for gain, later in pairwise(gains))


@pytest.mark.parametrize("total", [6, 9, 13, 18])
def test_no_other_way_to_share_out_has_more_spread(total: int) -> None:
    for beliefs in (BELIEFS[:3], BELIEFS[3:], [nearly_certain(p) for p in (0.02, 0.5, 0.8)]):
        counts = allocate(beliefs, total, 2, 6)
        assert sum(counts) == total and all(2 <= n <= 6 for n in counts)
        spread = math.fsum(b.spread(n) for b, n in zip(beliefs, counts, strict=True))
        assert spread == pytest.approx(best_by_trying(beliefs, total, 2, 6), abs=1e-12)


def test_rare_outcomes_get_more_episodes_and_equal_questions_as_many() -> None:
    rare, even, certain = nearly_certain(0.1), nearly_certain(0.5), nearly_certain(1 - 1e-8)
    counts = allocate([rare, even, certain], 24, 2, 16)
    assert counts[0] > counts[1] > counts[2] == 2
    assert allocate([SuccessBelief(1, 1)] * 3, 13, 2, 16) == [5, 4, 4]


@pytest.mark.parametrize("total", [5, 19])
def test_a_total_outside_the_bounds_is_an_error(total: int) -> None:
    with pytest.raises(ValueError, match=f"{total} episodes for 3 questions of 2 to 6"):
        allocate(BELIEFS[:3], total, 2, 6)


def test_the_money_lasts_for_what_remains() -> None:
    # 100 episodes can be paid, 20 of them are others; 4 updates remain
    assert affordable(50.0, 0.5, 20, 4) == 20
    assert affordable(49.9, 0.5, 20, 4) == 19
    assert affordable(5.0, 0.5, 20, 4) == 0


def played(id: str, row: Question, value: float | None) -> Trajectory:
    status = "failed" if value is None else "ok"
    trajectory = episode(id, reward=EpisodeReward(status=status, value=value))
    return trajectory.model_copy(update={"question": row})


def test_a_question_is_known_by_its_own_episodes_else_by_those_of_its_like() -> None:
    a, b = question("a", ("x_1",), question_type="t"), question("b", ("x_2",), question_type="t")
    other, unlike = question("c", ("y_1",), question_type="t"), question("d", ("z_1",))
    results = Results(success=0.5)
    assert results.belief(a) == SuccessBelief(1, 1)
    results.add([played("1", a, 0.5), played("2", a, 0.49), played("3", a, 1.0)])
    results.add([played("4", a, None)])  # no reward says nothing
    everyone = (2 + 2 * 0.5) / (3 + 2)
    of_type = (2 + 2 * everyone) / (3 + 2)
    of_document = (2 + 2 * of_type) / (3 + 2)
    for subject, mean, counts in (
        (a, of_document, (2, 1)),
        (b, of_document, (0, 0)),
        (other, of_type, (0, 0)),
        (unlike, everyone, (0, 0)),
    ):
        belief = results.belief(subject)
        assert belief.successes == pytest.approx(counts[0] + 2 * mean)
        assert belief.failures == pytest.approx(counts[1] + 2 * (1 - mean))
