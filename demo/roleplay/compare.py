"""Compares the policy at three stages: stats, replies, and a summary in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.common import read_evaluation
from scorekit.paired import mean_interval
from scorekit.report.render import visible
from trainer.roleplay.evaluation.stats import table
from trainer.runs.stats import mean_of

#: Turns whose replies are shown.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds an evaluation: its stats, and a line for each held-out turn."""

    title: str
    stats: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]


def read_stage(title: str, folder: Path, *, first: bool = False) -> Stage:
    """Read the evaluation in a folder. For a training run, read the last one, or the first."""
    stats, lines = read_evaluation(folder, first=first)
    return Stage(title, stats, lines)


def show_stats(console: Console, stages: Sequence[Stage]) -> None:
    """Print rewards with their components, and below them stats that no reward uses."""
    stats_table = Table("", *(stage.title for stage in stages))
    for stat in table():
        values = [stage.stats.get(stat.key) for stage in stages]
        if stat.title and None not in values:
            cells = [f"{value:.{stat.digits}f}" for value in values]
            stats_table.add_row(stat.title, *cells)
    console.print(stats_table)


def show_samples(console: Console, stages: Sequence[Stage]) -> None:
    """Print replies to the same turns: the first of the set, not the best."""
    samples_table = Table("the player says", *(stage.title for stage in stages), show_lines=True)
    for lines in list(zip(*(stage.lines for stage in stages), strict=True))[:SHOWN]:
        first_line = lines[0]
        speakers = (
            f"({first_line['character_name']}, {first_line['speech_level']}; "
            f"{first_line['player_name']})"
        )
        cells = [Text(visible(line["completion"]), overflow="fold") for line in lines]
        samples_table.add_row(Text(f"{visible(first_line['user'])}\n{speakers}"), *cells)
    console.print(samples_table)


def verdict(stages: Sequence[Stage]) -> list[str]:
    """Return sentences that say what each training changed, with intervals over the held-out
    turns.
    """
    start, sft, grpo = stages
    sentences = [
        f"SFT with the mended template: replies that do not end {_cut(start)} -> {_cut(sft)}.",
    ]
    for key, name in (("reward", "reward"), ("chrf", "chrF to the reference (never rewarded)")):
        both = zip(grpo.lines, sft.lines, strict=True)
        changes = [float(a[key]) - float(b[key]) for a, b in both]
        low, high = mean_interval(changes)
        sentences.append(
            f"GRPO: {name} {np.mean(changes):+.3f} a turn "
            f"(95 % interval of a paired bootstrap: {low:+.3f} to {high:+.3f})."
        )
    return sentences


def _cut(stage: Stage) -> str:
    share = mean_of([line["finish_reason"] == "length" for line in stage.lines])
    return "\N{EN DASH}" if share is None else f"{share:.0%}"
