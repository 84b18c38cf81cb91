"""Rules that end a run before its last update: the policy has left the reference too far, the
reward has collapsed, or nothing is learned any more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.runs.config import StopConfig


class StopRules:
    """Fed with the lines of log.jsonl, in order; those of an earlier process first."""

    def __init__(self, cfg: StopConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.cfg = cfg
        self._kl: deque[float] = deque(maxlen=cfg.patience)
        self._rewards: deque[float] = deque(maxlen=cfg.patience)
        self._best: float | None = None
        self._skipped = 0
        #: Why the run should end after the last line, in one line; None: it should not.
        self.reason: str | None = None
        for line in lines:
            self.add(line)

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
            "see reward_coverage and skipped_steps in log.jsonl (services that fail, or gradients "
            "that are not finite), then go on with --resume"
        )


def _mean_of_window(window: deque[float], value: float | None) -> float | None:
    """The mean with this value; None where it is missing, or the window is not full yet."""
    if value is None or not math.isfinite(value):
        return None
    window.append(value)
    return sum(window) / len(window) if len(window) == window.maxlen else None
