"""Distributions over a stage's records (lengths, scores, ...) as quantiles and histograms."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from synth.storage.store import Record

_BARS = 40


class Distribution:
    """Counts of values, rounded to multiples of `step` to bound the memory."""

    def __init__(self, step: float = 1.0) -> None:
        self._step = step
        self._counts: Counter[int] = Counter()
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[round(value / self._step)] += 1
        self._total += value

    def as_dict(self) -> dict[str, Any] | None:
        """Return n, mean, quantiles (rounded to step) and a histogram; None without values.

        `counts[i]` values lie from `edges[i]` on."""
        if not self._counts:
            return None
        keys = sorted(self._counts)
        n = self._counts.total()
        edges, counts = self._bars(keys)
        return {
            "n": n,
            "mean": round(self._total / n, 4),
            **{f"p{q}": self._quantile(keys, q / 100) for q in (0, 1, 10, 50, 90, 99, 100)},
            "edges": edges,
            "counts": counts,
        }

    def _quantile(self, keys: list[int], share: float) -> float:
        remaining = max(1, math.ceil(share * self._counts.total()))
        for key in keys:
            remaining -= self._counts[key]
            if remaining <= 0:
                break
        return self._value(key)

    def _bars(self, keys: list[int]) -> tuple[list[float], list[int]]:
        width = max(1, math.ceil((keys[-1] - keys[0] + 1) / _BARS))
        counts = [0] * ((keys[-1] - keys[0]) // width + 1)
        for key in keys:
            counts[(key - keys[0]) // width] += self._counts[key]
        return [self._value(keys[0] + i * width) for i in range(len(counts) + 1)], counts

    def _value(self, key: int) -> float:
        return round(key * self._step, 6)


@dataclass(frozen=True, slots=True)
class DistributionChart:
    """A distribution in a chart of the report; those with one title share a chart.

    kind: its label in the chart.
    axis: the label of its values.
    """

    title: str
    spread: str
    kind: str
    axis: str


#: Distributions and counts of a stage's records, by name.
Distributions = dict[str, "Distribution | Counter[str]"]


def as_dicts(distributions: Distributions) -> dict[str, Any]:
    """Return the distributions as they are stored in stats.json."""
    return {
        name: spread.as_dict() if isinstance(spread, Distribution) else dict(sorted(spread.items()))
        for name, spread in distributions.items()
    }


def stratum(record: Record) -> str:
    """Return a source's type and length bucket, for example "sentence 3"."""
    return f"{record['source_type']} {record['length_bucket_id']}"
