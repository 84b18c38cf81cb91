"""When a run ends before its last update."""

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
        if why := rules.add(row):
            return row["update"], why
    return None


def test_the_kl_of_patience_updates_must_stay_below_its_ceiling() -> None:
    cfg = StopConfig(kl_ceiling=1.0, patience=3)
    calm = [0.0, 2.9, 0.0, 0.0, 3.0, 0.0, 0.0]  # means of three: 0.97, 0.97, 1.0, 1.0, 1.0
    assert first_stop(cfg, lines(kl_ref_k3=calm)) is None
    stopped = first_stop(cfg, lines(kl_ref_k3=[*calm, 3.1]))
    assert stopped is not None and stopped[0] == 8
    for part in ("update 8: ", "3 updates is 1.033", "stop.kl_ceiling 1:", "rl.kl_coef"):
        assert part in stopped[1]
    assert first_stop(StopConfig(patience=3), lines(kl_ref_k3=[9.0] * 9)) is None


def test_a_reward_that_falls_from_its_best_mean_ends_the_run() -> None:
    cfg = StopConfig(reward_drop=2.0, patience=2)
    stopped = first_stop(cfg, lines(reward_mean=[0.0, 4.0, 6.0, 4.0, 2.0, 4.1]))
    assert stopped is None  # means of two: 2, 5, 5, 3, 3.05
    stopped = first_stop(cfg, lines(reward_mean=[0.0, 4.0, 6.0, 4.0, 1.9, 9.0]))
    assert stopped is not None and stopped[0] == 5
    assert "is 2.95, 2.05 below the best such mean, more than stop.reward_drop 2:" in stopped[1]


def test_updates_in_a_row_that_learn_nothing_end_the_run() -> None:
    flags = [True, True, False, True, True, True]
    stopped = first_stop(StopConfig(skipped_updates=3), lines(skipped=flags))
    assert stopped is not None and stopped[0] == 6
    assert "3 updates in a row learned nothing, stop.skipped_updates is 3" in stopped[1]
    for cause in ("services that fail", "samples that all earned the same", "not finite"):
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
    whole = StopRules(cfg)
    said = [whole.add(row) for row in rows]
    again = StopRules(cfg, rows[:cut])
    assert again.reason == (said[cut - 1] if cut else None)
    assert [again.add(row) for row in rows[cut:]] == said[cut:]
    assert said[-1] is not None


class Evaluated:
    """An evaluation with a reward and a metric."""

    def __init__(
        self, rating: float | None, mean: float | None, better: str = "higher", coverage: float = 1
    ) -> None:
        self.rating = rating
        self.values = {"metric_kiwi_better": better, "metric_kiwi_coverage": coverage}
        self.values |= {"metric_kiwi_mean": mean}

    def figures(self) -> dict[str, Any]:
        return self.values


def ends_at(cfg: StopConfig, *evaluations: Evaluated) -> int | None:
    rules = StopRules(cfg)
    return next((at for at, of in enumerate(evaluations) if rules.evaluated(at, of)), None)


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_reward_that_rises_while_a_held_out_metric_falls_ends_the_run(better: str) -> None:
    sign = 1 if better == "higher" else -1
    cfg = HeldOutStopConfig(held_out_falls=2)

    def seen(*pairs: tuple[float, float]) -> list[Evaluated]:
        return [Evaluated(reward, sign * metric, better) for reward, metric in pairs]

    assert ends_at(cfg, *seen((0, 9), (1, 8), (2, 7))) == 2
    assert ends_at(cfg, *seen((0, 9), (1, 8), (2, 8.5), (3, 8), (4, 7))) == 4  # it rose between
    assert ends_at(cfg, *seen((0, 9), (1, 8), (0, 7), (1, 6))) is None  # the reward fell, too
    assert ends_at(cfg, *seen((0, 1), (1, 2), (2, 3))) is None
    assert ends_at(StopConfig(), *seen((0, 9), (1, 8), (2, 7))) is None
    whole = StopRules(cfg, (), list(enumerate(seen((0, 9), (1, 8), (2, 7)))))
    assert whole.reason is not None and "stop.held_out_falls is 2" in whole.reason
    assert "kiwi" in whole.reason and "\n" not in whole.reason


def test_an_evaluation_without_the_metric_is_neither_a_fall_nor_an_end_of_one() -> None:
    cfg = HeldOutStopConfig(held_out_falls=2, held_out_metric="kiwi")
    gaps = [Evaluated(1, None), Evaluated(1, 0.0, coverage=0.5), Evaluated(None, 0.0)]
    for gap in gaps:
        assert ends_at(cfg, Evaluated(0, 9), Evaluated(1, 8), gap, Evaluated(2, 7)) == 3
    other = HeldOutStopConfig(held_out_falls=1, held_out_metric="other")
    assert ends_at(other, Evaluated(0, 9), Evaluated(1, 8)) is None
