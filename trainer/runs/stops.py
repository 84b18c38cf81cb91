"""Rules that end a run before its last update: the policy has left the reference too far, the
reward has collapsed, nothing is learned any more, or the reward rises while a held-out metric
falls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.runs.config import HeldOutStopConfig, StopConfig

#: Share of the samples that a metric has to have scored for its mean to be held against others.
_COVERED_FROM = 0.95


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
        #: Why the run should end after the last line, in one line; None: it should not.
        self.reason: str | None = None
        self._held_out: tuple[float, float] | None = None
        self._falls = 0
        for line in lines:
            self.add(line)
        for update, report in evaluations:
            self.evaluated(update, report)

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
        self.reason = next((f"update {line['update']}: {why}" for why in checks if why), None)
        return self.reason

    def evaluated(self, update: int, report: Any) -> str | None:
        """Why the run should end after this evaluation; None: it should not.

        report: an `Evaluation` (trainer/runs/loop.py) with the figures `metric_NAME_mean`,
        `_coverage` and `_better`. One that lacks them, or most of its rewards, counts for nothing.
        """
        cfg = self.cfg
        if not isinstance(cfg, HeldOutStopConfig) or cfg.held_out_falls is None:
            return None
        figures, reward = report.figures(), report.rating
        means = [k for k in figures if k.startswith("metric_") and k.endswith("_mean")]
        of = f"metric_{cfg.held_out_metric}" if cfg.held_out_metric else None
        of = of or next((key.removesuffix("_mean") for key in means), "")
        mean, better = figures.get(f"{of}_mean"), figures.get(f"{of}_better")
        covered = (figures.get(f"{of}_coverage") or 0.0) >= _COVERED_FROM
        if reward is None or mean is None or better is None or not covered:
            return None
        now = reward, mean if better == "higher" else -mean
        before, self._held_out = self._held_out, now
        fell = before is not None and now[0] > before[0] and now[1] < before[1]
        self._falls = self._falls + 1 if fell else 0
        if self._falls < cfg.held_out_falls:
            return None
        self.reason = (
            f"update {update}: in {self._falls} evaluations in a row the reward rose and the "
            f"held-out metric {of.removeprefix('metric_')} got worse (now {mean:.4g}), "
            f"stop.held_out_falls is {cfg.held_out_falls}: the policy pleases the reward alone; "
            "take an earlier checkpoint, or change the reward"
        )
        return self.reason

    def _kl_ceiling(self, value: float | None) -> str | None:
        mean = _mean_of_window(self._kl, value)
        limit = self.cfg.kl_ceiling
        if limit is None or mean is None or mean <= limit:
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
        if limit is None or drop <= limit:
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
    return sum(window) / len(window) if len(window) == window.maxlen else None
