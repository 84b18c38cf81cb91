"""How fast the parts of a run work: as told, as a finished stage of it shows, or as was measured
where this was written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from synth.context import Stage
from synth.folder.stats import process_figures
from synth.folder.store import StageFolder
from synth.stages.table import ORDER

#: About what is published for Qwen3-235B in FP8 on eight H100: docs/synthesis.md.
TOKENS_PER_S = 7500.0
#: Records from which on a stage that ran says how fast it is; the share of answers that it may have
#: found kept.
_ENOUGH, _MOST_KEPT = 50, 0.2


@dataclass(frozen=True, slots=True)
class Rates:
    """tokens: of the teacher's output, a second. scores, verdicts: of MetricX and the judge, a
    second; None: nobody knows. driver: CPU seconds a record, by stage, where it was measured.
    measured: stages that told."""

    tokens: float | None = None
    scores: float | None = None
    verdicts: float | None = None
    driver: tuple[tuple[str, float], ...] = ()
    measured: tuple[str, ...] = ()

    def over(self, other: Rates) -> Rates:
        """These, and the other's where nothing is told."""
        return replace(
            self,
            tokens=self.tokens or other.tokens,
            scores=self.scores or other.scores,
            verdicts=self.verdicts or other.verdicts,
            driver=self.driver or other.driver,
            measured=self.measured or other.measured,
        )


#: Nothing is told.
UNKNOWN = Rates()


def measured_rates(folders: Iterable[Path], stages: Sequence[Stage] = ORDER) -> Rates:
    """Of the first of these run folders whose finished stages tell. A stage that took kept answers
    says little of who gave them."""
    found = UNKNOWN
    for folder in folders:
        found = found.over(_rates_of(folder, stages))
    return found


def _rates_of(out_dir: Path, stages: Sequence[Stage]) -> Rates:
    told = {}
    for stage in stages:
        folder = StageFolder(out_dir, stage.name)
        if folder.done():
            figures = process_figures(folder)
            asked = sum(
                figures[who].get(what, 0)
                for who, what in (
                    ("teacher", "choices"),
                    ("metricx", "samples"),
                    ("judge", "samples"),
                )
            )
            if figures["seconds"] and figures["answers"].get("kept", 0) <= _MOST_KEPT * asked:
                told[stage.name] = figures
    tokens = _rate(told, "teacher", "completion_tokens")
    scores = _rate(told, "metricx", "samples")
    verdicts = _rate(told, "judge", "samples")
    driver = tuple(
        (name, figures["driver_cpu_s"] / figures["records_done"])
        for name, figures in told.items()
        if figures["driver_cpu_s"] and figures["records_done"] >= _ENOUGH
    )
    return Rates(tokens, scores, verdicts, driver, tuple(told))


def _rate(told: dict[str, dict[str, Any]], who: str, what: str) -> float | None:
    """A second, of the last stage that counts enough: later ones ask for more at once."""
    for figures in reversed(told.values()):
        count = figures[who].get(what, 0)
        if count >= _ENOUGH:
            return float(count / figures["seconds"])
    return None
