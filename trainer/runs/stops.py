"""Rules that end a run before its last update.

The policy is too far from the reference, the reward has collapsed, updates make no steps, or the
reward rises while a held-out metric gets worse.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scorekit.numeric import above
from trainer.runs.config import HeldOutStopConfig, StopConfig

#: Share of the samples that a metric has to have scored for a comparable mean.
_COVERED_FROM = 0.95


@dataclass(frozen=True, slots=True)
class _Watched:
    """An evaluation as `held_out_falls` compares it.

    name: of the metric, whose mean is `mean`.
    good: that mean, with the sign for which higher is better.
    comparable_by: must be equal for two to be compared: metric, its model, samples.
    """

    name: str
    reward: float
    mean: float
    good: float
    comparable_by: tuple[Any, ...]


class StopRules:
    """Applies the rules to the lines of log.jsonl, in order, and to evaluations.

    Those of an earlier process come first.
    """

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
        self._update_reason: str | None = None
        self._evaluation_reason: str | None = None
        self._last_evaluation: _Watched | None = None
        self._falls = 0
        for line in lines:
            self.add(line)
        for update, report in evaluations:
            self.evaluated(update, report)

    @property
    def reason(self) -> str | None:
        """Return in one line why the run should end after what came last; None: go on."""
        return self._update_reason or self._evaluation_reason

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Return why the run should end after this update; None: go on.

        Updates with a missing or non-finite stat (nothing was scored or trained on) count for the
        last rule only: NaN is neither a KL nor a reward.
        """
        self._skipped = self._skipped + 1 if line["skipped"] else 0
        checks = (
            self._kl_ceiling(line.get("kl_ref_k3")),
            self._reward_drop(line.get("reward_mean")),
            self._skipped_updates(),
        )
        reason = next((reason for reason in checks if reason), None)
        self._update_reason = f"update {line['update']}: {reason}" if reason else None
        return self._update_reason

    def evaluated(self, update: int, report: Any) -> str | None:
        """Return why the run should end after this evaluation; None: go on.

        report: an `EvaluationReport` with the stats `metric_NAME_mean`,
        `_coverage`, `_better` and `_model`. One without them, or without most of its rewards, is
        ignored. With another model or other samples, the count starts again.
        """
        limit = self.cfg.held_out_falls if isinstance(self.cfg, HeldOutStopConfig) else None
        now = self._watched_evaluation(report) if limit else None
        if limit is None or now is None:
            return None
        before, self._last_evaluation = self._last_evaluation, now
        got_worse = (
            before is not None
            and before.comparable_by == now.comparable_by
            and now.reward > before.reward
            and now.good < before.good
        )
        self._falls = self._falls + 1 if got_worse else 0
        self._evaluation_reason = None
        if self._falls >= limit:
            self._evaluation_reason = (
                f"update {update}: in {self._falls} evaluations in a row the reward rose and the "
                f"held-out metric {now.name} got worse (now {now.mean:.4g}), stop.held_out_falls "
                f"is {limit}: the policy exploits the reward. Use an earlier checkpoint, or raise "
                "that number and resume with --resume"
            )
        return self._evaluation_reason

    def _watched_evaluation(self, report: Any) -> _Watched | None:
        """Return what `held_out_falls` needs of an evaluation; None if something is missing."""
        assert isinstance(self.cfg, HeldOutStopConfig)
        stats = report.stats()
        mean_keys = [k for k in stats if k.startswith("metric_") and k.endswith("_mean")]
        first = mean_keys[0].removeprefix("metric_").removesuffix("_mean") if mean_keys else None
        name = self.cfg.held_out_metric or first
        mean, better, covered, model = (
            stats.get(f"metric_{name}_{key}") for key in ("mean", "better", "coverage", "model")
        )
        if None in (report.rating, mean, better) or (covered or 0.0) < _COVERED_FROM:
            return None
        good = mean if better == "higher" else -mean
        comparable_by = name, model, stats.get("samples")
        return _Watched(str(name), report.rating, mean, good, comparable_by)

    def _kl_ceiling(self, value: float | None) -> str | None:
        mean = _mean_of_window(self._kl, value)
        limit = self.cfg.kl_ceiling
        if limit is None or mean is None or not above(mean, limit):
            return None
        return (
            f"the mean KL to the reference of {len(self._kl)} updates is {mean:.4g}, above "
            f"stop.kl_ceiling {limit:g}. Raise rl.kl_coef or lower rl.lr, or raise the ceiling "
            "and resume with --resume"
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
            f"below the best such mean, more than stop.reward_drop {limit:g}. Lower rl.lr or raise "
            "rl.kl_coef, or use the best checkpoint (`export --best`)"
        )

    def _skipped_updates(self) -> str | None:
        limit = self.cfg.skipped_updates
        if limit is None or self._skipped < limit:
            return None
        return (
            f"{self._skipped} updates in a row made no step, stop.skipped_updates is {limit}. "
            "See reward_coverage, reward_mean and skipped_steps in log.jsonl (services that fail, "
            "samples with equal rewards, or gradients that are not finite). Raise it, or set it to "
            "null, and resume with --resume"
        )


def _mean_of_window(window: deque[float], value: float | None) -> float | None:
    """Return the mean with this value; None if it is missing, or the window is not full yet."""
    if value is None or not math.isfinite(value):
        return None
    window.append(value)
    return math.fsum(window) / len(window) if len(window) == window.maxlen else None
