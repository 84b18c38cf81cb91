"""Rules that end a run before its last update: the policy has left the reference too far, the
reward has collapsed, nothing is learned any more, or the reward rises while a held-out metric
falls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scorekit.numeric.thresholds import above
from trainer.runs.config import HeldOutStopConfig, StopConfig

#: Share of the samples that a metric has to have scored for its mean to be held against others.
_COVERED_FROM = 0.95


@dataclass(frozen=True, slots=True)
class _Watched:
    """An evaluation as `held_out_falls` sees it. name: of the metric, whose mean is `mean`; good:
    that mean, higher is better. of: what has to be the same for two to be held against each other:
    metric, its model, samples."""

    name: str
    reward: float
    mean: float
    good: float
    of: tuple[Any, ...]


class StopRules:
    """Fed with the lines of log.jsonl, in order, and with evaluations; those of an earlier process
    first."""

    def __init__(
        self,
        cfg: StopConfig,
        lines: Iterable[Mapping[str, Any]] = (),
        evaluations: Iterable[tuple[int, Any]] = (),
    ) -> None:
        self.cfg = cfg
        self._kl: deque[float] = deque(maxlen=cfg.patience)
        self._rewards: deque[float] = deque(maxlen=cfg.patience)
        self._best: float | None = None
        self._skipped = 0
        self._of_updates: str | None = None
        self._of_evaluations: str | None = None
        self._watched: _Watched | None = None
        self._falls = 0
        for line in lines:
            self.add(line)
        for update, report in evaluations:
            self.evaluated(update, report)

    @property
    def reason(self) -> str | None:
        """Why the run should end after what was last seen, in one line; None: it should not."""
        return self._of_updates or self._of_evaluations

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Why the run should end after this update; None: it should not.

        Updates without a figure, or with one that is not finite (nothing was scored, nothing was
        learned), count for the last rule only: NaN is neither a KL nor a reward.
        """
        self._skipped = self._skipped + 1 if line["skipped"] else 0
        checks = (
            self._kl_ceiling(line.get("kl_ref_k3")),
            self._reward_drop(line.get("reward_mean")),
            self._skipped_updates(),
        )
        why = next((why for why in checks if why), None)
        self._of_updates = f"update {line['update']}: {why}" if why else None
        return self._of_updates

    def evaluated(self, update: int, report: Any) -> str | None:
        """Why the run should end after this evaluation; None: it should not.

        report: an `Evaluation` (trainer/runs/loop.py) with the figures `metric_NAME_mean`,
        `_coverage`, `_better` and `_model`. One that lacks them, or most of its rewards, counts for
        nothing. Behind another model, or on other samples, falls are counted anew.
        """
        limit = self.cfg.held_out_falls if isinstance(self.cfg, HeldOutStopConfig) else None
        now = self._look_at(report) if limit else None
        if limit is None or now is None:
            return None
        before, self._watched = self._watched, now
        fell = (
            before is not None
            and before.of == now.of
            and now.reward > before.reward
            and now.good < before.good
        )
        self._falls = self._falls + 1 if fell else 0
        self._of_evaluations = None
        if self._falls >= limit:
            self._of_evaluations = (
                f"update {update}: in {self._falls} evaluations in a row the reward rose and the "
                f"held-out metric {now.name} got worse (now {now.mean:.4g}), stop.held_out_falls "
                f"is {limit}: the policy pleases the reward alone; take an earlier checkpoint, or "
                "raise that number and go on with --resume"
            )
        return self._of_evaluations

    def _look_at(self, report: Any) -> _Watched | None:
        """What `held_out_falls` needs of an evaluation; None where it does not have it all."""
        assert isinstance(self.cfg, HeldOutStopConfig)
        figures = report.figures()
        starts = [k for k in figures if k.startswith("metric_") and k.endswith("_mean")]
        first = starts[0].removeprefix("metric_").removesuffix("_mean") if starts else None
        name = self.cfg.held_out_metric or first
        mean, better, covered, model = (
            figures.get(f"metric_{name}_{key}") for key in ("mean", "better", "coverage", "model")
        )
        if None in (report.rating, mean, better) or (covered or 0.0) < _COVERED_FROM:
            return None
        good = mean if better == "higher" else -mean
        of = name, model, figures.get("samples")
        return _Watched(str(name), report.rating, mean, good, of)

    def _kl_ceiling(self, value: float | None) -> str | None:
        mean = _mean_of_window(self._kl, value)
        limit = self.cfg.kl_ceiling
        if limit is None or mean is None or not above(mean, limit):
            return None
        return (
            f"the mean KL to the reference of {len(self._kl)} updates is {mean:.4g}, above "
            f"stop.kl_ceiling {limit:g}: raise rl.kl_coef or lower rl.lr, or raise the ceiling and "
            "go on with --resume"
        )

    def _reward_drop(self, value: float | None) -> str | None:
        mean = _mean_of_window(self._rewards, value)
        if mean is None:
            return None
        self._best = mean if self._best is None else max(self._best, mean)
        limit, drop = self.cfg.reward_drop, self._best - mean
        if limit is None or not above(drop, limit):
            return None
        return (
            f"the mean reward of {len(self._rewards)} updates is {mean:.4g}, {drop:.4g} "
            f"below the best such mean, more than stop.reward_drop {limit:g}: lower rl.lr or raise "
            "rl.kl_coef, or take the best checkpoint (`export --best`)"
        )

    def _skipped_updates(self) -> str | None:
        limit = self.cfg.skipped_updates
        if limit is None or self._skipped < limit:
            return None
        return (
            f"{self._skipped} updates in a row learned nothing, stop.skipped_updates is {limit}: "
            "see reward_coverage, reward_mean and skipped_steps in log.jsonl (services that fail, "
            "samples that all earned the same, or gradients that are not finite); raise it, or set "
            "it to null, and go on with --resume"
        )


def _mean_of_window(window: deque[float], value: float | None) -> float | None:
    """The mean with this value; None where it is missing, or the window is not full yet."""
    if value is None or not math.isfinite(value):
        return None
    window.append(value)
    return math.fsum(window) / len(window) if len(window) == window.maxlen else None
