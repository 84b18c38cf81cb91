"""Rates of the parts of a run: given by the user, measured in a finished stage, or defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from synth.context import Stage
from synth.stages.table import ORDER
from synth.storage.stats import process_stats
from synth.storage.store import StageFolder

#: Approximate published rate of Qwen3-235B in FP8 on eight H100: docs/how-to/synthesis.md.
TOKENS_PER_S = 7500.0
#: Smallest number of records, and largest share of cached answers, for a measured rate.
_ENOUGH, _MAX_CACHED_SHARE = 50, 0.2


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second.

    tokens: of the teacher's output. scores, verdicts: of MetricX and the judge; None: unknown.
    driver: measured CPU seconds per record, by stage. measured: stages with measured rates."""

    tokens: float | None = None
    scores: float | None = None
    verdicts: float | None = None
    driver: tuple[tuple[str, float], ...] = ()
    measured: tuple[str, ...] = ()

    def over(self, other: Rates) -> Rates:
        """Return these rates, with the other's where they are unknown."""
        names = [entry.name for entry in fields(self)]
        return Rates(**{name: getattr(self, name) or getattr(other, name) for name in names})


#: No rate is known.
UNKNOWN = Rates()


def measured_rates(folders: Iterable[Path], stages: Sequence[Stage] = ORDER) -> Rates:
    """Return the rates measured in the first run folder that has them.

    Stages that mostly used cached answers are ignored."""
    rates = UNKNOWN
    for folder in folders:
        rates = rates.over(_rates_of(folder, stages))
    return rates


def _rates_of(out_dir: Path, stages: Sequence[Stage]) -> Rates:
    stats_by_stage = {}
    for stage in stages:
        folder = StageFolder(out_dir, stage.name)
        if folder.done():
            stage_stats = process_stats(folder)
            num_calls = sum(
                stage_stats[service].get(count_key, 0)
                for service, count_key in (
                    ("teacher", "choices"),
                    ("metricx", "samples"),
                    ("judge", "samples"),
                )
            )
            if (
                stage_stats["seconds"]
                and stage_stats["answers"].get("kept", 0) <= _MAX_CACHED_SHARE * num_calls
            ):
                stats_by_stage[stage.name] = stage_stats
    tokens = _rate(stats_by_stage, "teacher", "completion_tokens")
    scores = _rate(stats_by_stage, "metricx", "samples")
    verdicts = _rate(stats_by_stage, "judge", "samples")
    driver = tuple(
        (name, stage_stats["driver_cpu_s"] / stage_stats["records_done"])
        for name, stage_stats in stats_by_stage.items()
        if stage_stats["driver_cpu_s"] and stage_stats["records_done"] >= _ENOUGH
    )
    return Rates(tokens, scores, verdicts, driver, tuple(stats_by_stage))


def _rate(stats_by_stage: dict[str, dict[str, Any]], service: str, count_key: str) -> float | None:
    """Return the rate of the last stage with enough records: later stages are more parallel."""
    for stage_stats in reversed(stats_by_stage.values()):
        count = stage_stats[service].get(count_key, 0)
        if count >= _ENOUGH:
            return float(count / stage_stats["seconds"])
    return None
