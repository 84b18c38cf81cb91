"""Warn if a policy learns to echo the user: the share of such replies rises above its start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from scorekit.numeric import above
from trainer.runs.stats import mean_of

log = logging.getLogger(__name__)

#: The observed stat, in evaluations and in the lines of log.jsonl.
ECHO = "grounded/echo"
#: A larger rise of the share gives a warning.
MAX_RISE = 0.05
#: Number of updates that are averaged and compared with the first ones: one has few replies.
WINDOW = 10


class EchoWatch:
    """Tracks the shares of one run, and warns once for evaluations and once for training.

    earlier_evaluations, earlier_updates: the stats of a resumed run so far.
    """

    def __init__(
        self,
        earlier_evaluations: Iterable[Mapping[str, Any]] = (),
        earlier_updates: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._evaluated = _shares(earlier_evaluations)
        self._trained = _shares(earlier_updates)
        self._has_warned = {"evaluation": False, "training": False}

    def add_evaluation(self, update: int, stats: Mapping[str, Any]) -> None:
        """Compare an evaluation with the first one, which is that of the start."""
        self._evaluated += _shares([stats])
        if self._evaluated:
            self._compare("evaluation", update, self._evaluated[0], self._evaluated[-1])

    def add_update(self, update: int, stats: Mapping[str, Any]) -> None:
        """Compare the last updates with the first ones."""
        self._trained += _shares([stats])
        first, last = mean_of(self._trained[:WINDOW]), mean_of(self._trained[-WINDOW:])
        if len(self._trained) >= 2 * WINDOW and first is not None and last is not None:
            self._compare("training", update, first, last)

    def _compare(self, kind: str, update: int, start: float, now: float) -> None:
        if not above(now - start, MAX_RISE) or self._has_warned[kind]:
            return
        self._has_warned[kind] = True
        log.warning(
            "%s: %.2f at update %d (%s), %.2f at the start: the policy learns to repeat the user. "
            "Read the completions; reward.echo_guard: true scores such replies 0.",
            ECHO,
            now,
            update,
            kind,
            start,
        )


def _shares(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    return [line[ECHO] for line in lines if line.get(ECHO) is not None]
