"""Check the rules that stop a run before its last update."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.runs.config import HeldOutStopConfig, StopConfig
from trainer.runs.stops import StopRules


def lines(**columns: list[Any]) -> list[dict[str, Any]]:
    count = len(next(iter(columns.values())))
    base = {"skipped": False, "kl_ref_k3": None, "reward_mean": None}
    return [
        base | {"update": i + 1} | {name: values[i] for name, values in columns.items()}
        for i in range(count)
    ]


def first_stop(cfg: StopConfig, rows: list[dict[str, Any]]) -> tuple[int, str] | None:
    rules = StopRules(cfg)
    for row in rows:
        if reason := rules.add(row):
            return row["update"], reason
    return None


def test_the_kl_of_patience_updates_must_stay_below_its_ceiling() -> None:
    cfg = StopConfig(kl_ceiling=1.0, patience=3)
    calm = [0.0, 2.9, 0.0, 0.0, 3.0, 0.0, 0.0]  # means of three: 0.97, 0.97, 1.0, 1.0, 1.0
    assert first_stop(cfg, lines(kl_ref_k3=calm)) is None
    stopped = first_stop(cfg, lines(kl_ref_k3=[*calm, 3.1]))
    assert stopped is not None and stopped[0] == 8
    for part in ("update 8: ", "3 updates is 1.033", "stop.kl_ceiling 1.", "rl.kl_coef"):
        assert part in stopped[1]
    assert first_stop(StopConfig(patience=3), lines(kl_ref_k3=[9.0] * 9)) is None


def test_a_reward_that_falls_from_its_best_mean_ends_the_run() -> None:
    cfg = StopConfig(reward_drop=2.0, patience=2)
    stopped = first_stop(cfg, lines(reward_mean=[0.0, 4.0, 6.0, 4.0, 2.0, 4.1]))
    assert stopped is None  # means of two: 2, 5, 5, 3, 3.05
    stopped = first_stop(cfg, lines(reward_mean=[0.0, 4.0, 6.0, 4.0, 1.9, 9.0]))
    assert stopped is not None and stopped[0] == 5
    assert "is 2.95, 2.05 below the best such mean, more than stop.reward_drop 2." in stopped[1]


def test_a_mean_on_its_limit_does_not_end_the_run() -> None:
    """Check float rounding: the mean of eight 0.7 is 0.7000000000000001; 0.8 - 0.6 exceeds 0.2."""
    cfg = StopConfig(kl_ceiling=0.7, patience=8)
    assert first_stop(cfg, lines(kl_ref_k3=[0.7] * 8)) is None
    assert first_stop(cfg, lines(kl_ref_k3=[0.7] * 7 + [0.701])) is not None
    cfg = StopConfig(reward_drop=0.2, patience=1)
    assert first_stop(cfg, lines(reward_mean=[0.8, 0.6])) is None
    assert first_stop(cfg, lines(reward_mean=[0.8, 0.599])) is not None


def test_updates_in_a_row_that_learn_nothing_end_the_run() -> None:
    flags = [True, True, False, True, True, True]
    stopped = first_stop(StopConfig(skipped_updates=3), lines(skipped=flags))
    assert stopped is not None and stopped[0] == 6
    assert "3 updates in a row made no step, stop.skipped_updates is 3" in stopped[1]
    for cause in ("services that fail", "samples with equal rewards", "not finite"):
        assert cause in stopped[1]
    assert first_stop(StopConfig(skipped_updates=None), lines(skipped=[True] * 30)) is None


def test_updates_without_a_figure_neither_fill_nor_empty_the_window() -> None:
    cfg = StopConfig(kl_ceiling=1.0, patience=2)
    rows = lines(kl_ref_k3=[2.0, None, None, 2.0])
    assert first_stop(cfg, rows) is not None
    assert first_stop(cfg, rows[:3]) is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_neither_a_kl_nor_a_reward(odd: float) -> None:
    cfg = StopConfig(kl_ceiling=1.0, reward_drop=1.0, patience=2)
    calm = [0.5, odd, 0.5, odd, 0.5]
    assert first_stop(cfg, lines(kl_ref_k3=calm, reward_mean=calm)) is None
    stopped = first_stop(cfg, lines(kl_ref_k3=[*calm, 1.6]))
    assert stopped is not None and "of 2 updates is 1.05, above" in stopped[1]


@pytest.mark.parametrize("cut", range(6))
def test_rules_that_are_fed_anew_say_the_same(cut: int) -> None:
    cfg = StopConfig(kl_ceiling=1.0, reward_drop=2.0, patience=2, skipped_updates=3)
    rows = lines(
        kl_ref_k3=[0.1, 0.9, 0.5, 1.0, 0.9, 1.3], reward_mean=[5.0, 5.0, 4.0, 4.0, 3.5, 3.5]
    )
    rules = StopRules(cfg)
    reasons = [rules.add(row) for row in rows]
    resumed = StopRules(cfg, rows[:cut])
    assert resumed.reason == (reasons[cut - 1] if cut else None)
    assert [resumed.add(row) for row in rows[cut:]] == reasons[cut:]
    assert reasons[-1] is not None


class Evaluated:
    """A fake evaluation with a reward and a metric."""

    def __init__(
        self,
        rating: float | None,
        mean: float | None,
        better: str | None = "higher",
        name: str = "kiwi",
        **extra_fields: Any,
    ) -> None:
        self.rating = rating
        fields = {
            "mean": mean,
            "coverage": 1.0,
            "better": better,
            "model": f"{name}@1",
        } | extra_fields
        samples = {"samples": fields.pop("samples", 8)}
        self.values = samples | {f"metric_{name}_{key}": value for key, value in fields.items()}

    def stats(self) -> dict[str, Any]:
        return self.values


def seen(*pairs: tuple[float, float], better: str = "higher") -> list[Evaluated]:
    """Return evaluations from (reward, metric) pairs; negate metrics for which lower is better."""
    sign = 1 if better == "higher" else -1
    return [Evaluated(reward, sign * metric, better) for reward, metric in pairs]


def ends_at(cfg: StopConfig, *evaluations: Evaluated) -> int | None:
    rules = StopRules(cfg)
    return next(
        (update for update, report in enumerate(evaluations) if rules.evaluated(update, report)),
        None,
    )


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_reward_that_rises_while_a_held_out_metric_falls_ends_the_run(better: str) -> None:
    def end(falls: int | None, *pairs: tuple[float, float]) -> int | None:
        return ends_at(HeldOutStopConfig(held_out_falls=falls), *seen(*pairs, better=better))

    falling = ((0, 9), (1, 8), (2, 7), (3, 6))
    assert [end(falls, *falling) for falls in (1, 2, 3, 4, None)] == [1, 2, 3, None, None]
    assert end(2, (0, 9), (1, 8), (2, 8.5), (3, 8), (4, 7)) == 4  # it rose in between
    assert end(2, (0, 9), (1, 8), (0, 7), (1, 6)) is None  # the reward fell, too
    assert end(1, (0, 1), (1, 2), (2, 3)) is None
    assert end(1, (3, 9), (2, 8), (1, 7)) is None
    assert ends_at(StopConfig(), *seen(*falling, better=better)) is None


def test_what_stays_equal_neither_rises_nor_falls() -> None:
    one_fall, two_falls = HeldOutStopConfig(held_out_falls=1), HeldOutStopConfig(held_out_falls=2)
    assert ends_at(one_fall, *seen((0, 9), (0, 8), (1, 8))) is None
    for between in ((1, 7), (2, 8)):  # the reward or the metric is equal: the series ends
        assert ends_at(two_falls, *seen((0, 9), (1, 8), between, (3, 6.5), (4, 6))) == 4


def test_the_end_is_told_with_figures_and_what_to_do() -> None:
    cfg = HeldOutStopConfig(held_out_falls=2)
    for better, now in (("higher", "(now 7)"), ("lower", "(now -7)")):
        falling = seen((0, 9), (1, 8), (2, 7), better=better)
        reason = StopRules(cfg, (), enumerate(falling)).reason
        assert reason is not None and reason.startswith("update 2: in 2 evaluations in a row")
        for part in ("metric kiwi got worse", now, "stop.held_out_falls is 2", "--resume"):
            assert part in reason
        assert "\n" not in reason


GAPS = [
    Evaluated(1.5, None, None, coverage=0.0),  # the service was down
    Evaluated(1.5, None, coverage=0.0),  # it failed on every sample
    Evaluated(1.5, None),
    Evaluated(1.5, 0.0, coverage=0.94),
    Evaluated(1.5, 99.0, coverage=0.94),
    Evaluated(1.5, 0.0, coverage=None),  # from a file without it
    Evaluated(1.5, 0.0, None),
    Evaluated(None, 0.0),  # too many have no reward
    Evaluated(None, 99.0),
]


@pytest.mark.parametrize("gap", GAPS)
def test_an_evaluation_without_the_metric_is_neither_a_fall_nor_an_end_of_one(
    gap: Evaluated,
) -> None:
    one_fall = HeldOutStopConfig(held_out_falls=1)
    two_falls = HeldOutStopConfig(held_out_falls=2, held_out_metric="kiwi")
    start, lower, lowest = seen((1, 9), (2, 8), (3, 7))
    assert ends_at(one_fall, start, gap) is None and ends_at(one_fall, gap, start) is None
    assert ends_at(two_falls, start, lower, gap, lowest) == 3
    assert ends_at(two_falls, start, gap, gap, lower) is None  # counted once across the gap


def test_a_mean_over_nearly_all_samples_counts() -> None:
    cfg = HeldOutStopConfig(held_out_falls=1)
    assert ends_at(cfg, Evaluated(0, 9), Evaluated(1, 8, coverage=0.95)) == 1


@pytest.mark.parametrize("change", [{"model": "kiwi@2"}, {"samples": 4}])
def test_another_model_or_other_samples_begin_a_row_of_their_own(change: dict[str, Any]) -> None:
    """Check a metric service with another checkpoint, and a changed eval.eval_limit."""
    cfg = HeldOutStopConfig(held_out_falls=2)
    before = seen((0, 9), (1, 8))
    after = [Evaluated(2, 3, **change), Evaluated(3, 2, **change), Evaluated(4, 1, **change)]
    assert ends_at(cfg, *before, *after) == 4


def test_the_metric_that_is_watched_is_the_named_one_or_the_first() -> None:
    reports = seen((0, 9), (1, 8))
    for report, other in zip(reports, (1, 2), strict=True):
        report.values |= Evaluated(None, other, name="other").values
    for name, end in ((None, 1), ("kiwi", 1), ("other", None), ("third", None)):
        cfg = HeldOutStopConfig(held_out_falls=1, held_out_metric=name)
        assert ends_at(cfg, *reports) == end
    # A resumed run may have another first metric: the two must not be compared.
    other = Evaluated(1, 8, name="other", model="kiwi@1")
    assert ends_at(HeldOutStopConfig(held_out_falls=1), *seen((0, 9)), other) is None


@pytest.mark.parametrize("cut", range(7))
def test_evaluations_that_are_fed_anew_say_the_same(cut: int) -> None:
    """Check replayed evaluations, as with `--resume`: an interrupted series is no stop reason."""
    cfg = HeldOutStopConfig(held_out_falls=2)
    every = list(enumerate(seen((0, 9), (1, 8), (2, 7), (3, 9), (4, 8), (5, 7))))
    rules = StopRules(cfg)
    reasons = [rules.evaluated(*evaluation) for evaluation in every]
    assert [reason is not None for reason in reasons] == [False, False, True, False, False, True]
    resumed = StopRules(cfg, (), every[:cut])
    assert resumed.reason == (reasons[cut - 1] if cut else None)
    assert [resumed.evaluated(*evaluation) for evaluation in every[cut:]] == reasons[cut:]


def test_the_rules_of_updates_and_of_evaluations_end_a_run_side_by_side() -> None:
    cfg = HeldOutStopConfig(held_out_falls=1, skipped_updates=1)
    idle, calm = lines(skipped=[True, False])
    rules = StopRules(cfg, [idle], enumerate(seen((0, 1), (1, 2))))
    assert rules.reason is not None and "made no step" in rules.reason
    rules.add(calm)
    assert rules.reason is None
    rules.evaluated(2, Evaluated(2, 1))
    rules.add(calm)
    assert rules.reason is not None and "got worse" in rules.reason
