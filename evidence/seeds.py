"""Shared parts of the training benchmarks: arms in processes, results over seeds, and the pages.

A claim about training needs several seeds: each seed is one observation. An interval over
questions holds the trained policies fixed. It says how other questions would turn out for these
policies, and nothing about another seed.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT, markdown_table, write_between
from scorekit.errors import UserError
from testing.processes import run_module

#: Where the pages of the results stand, and their pictures.
PAGES = ROOT / "docs/explanation/evidence"
#: Longest line of prose that is written into a page.
_LINE = 110


def check_arms(only: Sequence[str], arm_names: Collection[str]) -> None:
    """Raise UserError where an arm that is asked for is none."""
    unknown = sorted(set(only) - set(arm_names))
    if unknown:
        raise UserError(f"--only: no arm {unknown[0]!r}; known: {', '.join(arm_names)}")


def run_logged(
    module: str, config: Path, settings: Sequence[str], log: Path, environment: Mapping[str, str]
) -> float:
    """Run `python -m MODULE train` in its own process, and return its seconds.

    settings: KEY=VALUE.
    environment: variables besides ours.
    Raises UserError with the end of the log if the command fails.
    """
    command = [module, "train", "--config", str(config)]
    for setting in settings:
        command += ["--set", setting]
    started = time.monotonic()
    if code := run_module(*command, log=log, env=environment):
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"the trainer ended with exit code {code}; the end of {log}:\n{tail}")
    return time.monotonic() - started


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the runs of a folder, in the order of their files (ARM-SEED.json)."""
    paths = sorted(folder.glob("*-[0-9]*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def cell(value: float | None, digits: int) -> str:
    """Return a number as a table cell; a dash if there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are there; None if there is none."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def spread(values: Sequence[float | None], digits: int, *, signs: bool = False) -> str:
    """Return the lowest and the highest value as a table cell; a dash if there is none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    sign = "+" if signs else ""
    low, high = (f"{value:{sign}.{digits}f}" for value in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def spread_shares(values: Sequence[float]) -> str:
    """Return the lowest and the highest share in percent as a table cell."""
    return f"{spread([100 * value for value in values], 0)} %"


def wrapped(text: str) -> str:
    """Return a paragraph in lines of a page."""
    return textwrap.fill(text, _LINE, break_long_words=False, break_on_hyphens=False)


def write_section(title: str, begin: str, end: str, body: str, page: Path) -> None:
    """Put text between two marks of a page. A page without the marks gets a section at its end."""
    text = page.read_text(encoding="utf-8")
    if begin not in text:
        page.write_text(f"{text.rstrip()}\n\n## {title}\n\n{begin}\n{end}\n", encoding="utf-8")
    write_between(begin, end, body, page)


def bullet(text: str) -> str:
    """Return an item of a list in lines of a page."""
    lines = wrapped(text).split("\n")
    return "- " + "\n  ".join(lines)


#: Seed -> the change of a run.
Changes = Mapping[int, float]


class SeedInterval(NamedTuple):
    """The interval of a mean over seeds.

    low, high: 95 %; None for fewer than two seeds.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0, on either side."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def as_text(self, digits: int = 3) -> str:
        """Return `mean [low, high]` with signs."""
        mean = f"{self.mean:+.{digits}f}"
        if self.low is None or self.high is None:
            return f"{mean} (one seed)"
        return f"{mean} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def seed_interval(values: Sequence[float]) -> SeedInterval:
    """Return the mean of the seeds' values with Student's 95 % interval, n - 1 degrees of freedom.

    (Student 1908, "The Probable Error of a Mean".) Raises ValueError of no values.
    """
    if not values:
        raise ValueError("there are no seeds")
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return SeedInterval(mean, None, None)
    from scipy.stats import t

    half = float(t.ppf(0.975, count - 1)) * statistics.stdev(values) / math.sqrt(count)
    return SeedInterval(mean, mean - half, mean + half)


def against(changes: Changes, control: Changes) -> SeedInterval | None:
    """Return the interval of arm - control over the seeds that both have; None where none is."""
    both = sorted(changes.keys() & control.keys())
    return seed_interval([changes[seed] - control[seed] for seed in both]) if both else None


def seeds_table(arms: Mapping[str, Changes], control: str, *, digits: int = 3) -> str:
    """Return a table of arms by seeds as the unit.

    arms: title -> changes.
    control: a title.
    """
    rows = []
    for title, changes in arms.items():
        changes_text = ", ".join(f"{changes[seed]:+.{digits}f}" for seed in sorted(changes))
        interval = seed_interval(list(changes.values()))
        less = None if title == control else against(changes, arms[control])
        rows.append(
            [
                title,
                changes_text,
                interval.as_text(digits),
                _clear(interval),
                "" if less is None else less.as_text(digits),
                "" if less is None else _clear(less),
            ]
        )
    head = ["", "seed by seed", "mean of the seeds [95 %]", "clear of 0"]
    return markdown_table([*head, f"less *{control}*, paired by seed [95 %]", "clear of 0"], rows)


def seeds_verdict(title: str, arms: Mapping[str, Changes], control: str) -> str:
    """Return the sentences that say which arms rise, and which rise above the control.

    what: the name of the changes. An arm with one seed shows nothing either way, and is left out.
    """
    tried = [title for title in arms if title != control and len(arms[title]) > 1]
    rises = [title for title in tried if _rises(seed_interval(list(arms[title].values())))]
    beats = [title for title in tried if _rises(against(arms[title], arms[control]))]
    return (
        f"**{title}.** Rises from the start, clear of 0 over the seeds: {_names(rises, tried)}. "
        f"Rises above *{control}*, paired by seed: {_names(beats, tried)}."
    )


def _rises(interval: SeedInterval | None) -> bool:
    return interval is not None and interval.is_clear and interval.mean > 0


def _names(subset: Sequence[str], every: Sequence[str]) -> str:
    """Return the titles in `some`, and those of `every` for which nothing is shown."""
    if not subset or len(subset) == len(every):
        return "all" if subset else "none"
    missing = [title for title in every if title not in subset]
    return "; ".join(f"*{title}*" for title in subset) + f" (not shown for {'; '.join(missing)})"


def _clear(interval: SeedInterval) -> str:
    return "" if interval.low is None else "yes" if interval.is_clear else "no"
