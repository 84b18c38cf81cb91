"""The report of an evaluation, and those that a run has written to its eval.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from scorekit.numeric import below
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import JsonlFile

#: Share of the samples with a possible reward that a mean has to cover to be comparable.
_RATED_FROM = 0.95
#: Keys of a line of eval.jsonl that are no stats of the report.
_LINE_KEYS = frozenset({"set", "update", "completions", "decides", "stopped"})


@dataclass(slots=True)
class EvaluationReport:
    """The stats of an evaluation on a set, and one line of its dump for each sample.

    values: the stats by their keys; a mean without values is None. `report[key]` gives them, too.
    `reward_mean` is over the samples that have a reward (`reward_coverage`).
    unrewardable: key of the number of samples that could have none; a task's own.
    """

    values: dict[str, Any]
    examples: Sequence[dict[str, Any]]
    unrewardable: ClassVar[str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return int(self.values["samples"])

    @property
    def reward_mean(self) -> float | None:
        """Return the mean reward; None without any reward."""
        return self.values["reward_mean"]

    @property
    def reward_coverage(self) -> float:
        """Return the share of the samples that have a reward."""
        return float(self.values["reward_coverage"])

    @property
    def rating(self) -> float | None:
        """Return reward_mean, which the best checkpoint is chosen by; None if it covers too few.

        The samples without a reward may be the hard ones.
        """
        num_possible = self.samples - (self.values.get(self.unrewardable) or 0)
        num_covered = round(self.reward_coverage * self.samples)
        return None if below(num_covered, _RATED_FROM * num_possible) else self.reward_mean

    def stats(self) -> dict[str, Any]:
        """Return all stats by their keys."""
        return dict(self.values)


R = TypeVar("R", bound=EvaluationReport)


def lines_by_set(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return lines of eval.jsonl by the names of their sets."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        sets.setdefault(line.get("set", DEFAULT_EVAL_SET), []).append(line)
    return sets


def reports_by_set(
    folder: Path, lines: Iterable[dict[str, Any]], report_type: type[R]
) -> dict[str, list[tuple[int, R]]]:
    """Return (update, report) of the evaluations of a run, by the names of their sets.

    folder: of the run. lines: of its eval.jsonl.
    """

    def report(line: dict[str, Any]) -> R:
        values = {key: value for key, value in line.items() if key not in _LINE_KEYS}
        return report_type(values, JsonlFile(folder / line["completions"]))

    return {
        name: [(line["update"], report(line)) for line in set_lines]
        for name, set_lines in lines_by_set(lines).items()
    }
