"""Signs that a policy exploits its reward: stats of replies, and a warning if it echoes the user.

No reward uses these stats.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scorekit.numeric import above
from trainer.runs.stats import mean_of

log = logging.getLogger(__name__)

#: Characters of a substring that counts as copied or repeated.
STRETCH = 8


def copied_share(text: str, source: str | None) -> float | None:
    """Return the share of a reply's characters in substrings that are also in `source`.

    A substring has `STRETCH` or more characters; runs of white space count as one space. None for
    an empty reply, or without a source.
    """
    source_text, reply = _fold(source or ""), _fold(text)
    if not source_text or not reply:
        return None
    source_substrings = _substrings(source_text)
    marked = [False] * len(reply)
    for first in range(len(reply) - STRETCH + 1):
        if reply[first : first + STRETCH] in source_substrings:
            marked[first : first + STRETCH] = [True] * STRETCH
    return sum(marked) / len(reply)


def repeated_share(text: str) -> float | None:
    """Return the share of a reply's substrings of `STRETCH` characters that came before in it.

    0 for a shorter reply, None for an empty one.
    """
    reply = _fold(text)
    if not reply:
        return None
    count = max(0, len(reply) - STRETCH + 1)
    return 1 - len(_substrings(reply)) / count if count else 0.0


def distinct(texts: Sequence[str]) -> float | None:
    """Return the number of different replies divided by the number of replies; None without
    replies."""
    return len({_fold(text) for text in texts}) / len(texts) if texts else None


def _fold(text: str) -> str:
    return " ".join(text.split())


def _substrings(text: str) -> set[str]:
    return {text[first : first + STRETCH] for first in range(len(text) - STRETCH + 1)}


# -- a warning of echoes ---------------------------------------------------------------------------


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
