"""The policy at three stages, side by side: figures, replies, and what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.run import paired_interval
from scorekit.report.render import visible
from trainer.roleplay.evaluation.stats import table
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of

#: Turns whose replies are shown.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """An evaluation: its figures, and a line for each held-out turn."""

    title: str
    figures: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]


def read_stage(title: str, folder: Path, *, first: bool = False) -> Stage:
    """The evaluation in a folder; of a training run the last one, or the first."""
    alone = folder / "evaluation.jsonl"
    if alone.is_file():
        figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        return Stage(title, figures, read_jsonl(alone))
    found = read_jsonl(folder / "eval.jsonl")[0 if first else -1]
    return Stage(title, found, read_jsonl(folder / found["completions"]))


def show_figures(console: Console, stages: Sequence[Stage]) -> None:
    """Rewards with their components, and below them what no reward looks at."""
    shown = Table("", *(stage.title for stage in stages))
    for figure in table():
        values = [stage.figures.get(figure.key) for stage in stages]
        if figure.title and None not in values:
            cells = [f"{value:.{figure.digits}f}" for value in values]
            shown.add_row(figure.title, *cells)
    console.print(shown)


def show_samples(console: Console, stages: Sequence[Stage]) -> None:
    """Replies to the same turns: the first of the set, not the best."""
    shown = Table("the player says", *(stage.title for stage in stages), show_lines=True)
    for lines in list(zip(*(stage.lines for stage in stages), strict=True))[:SHOWN]:
        asked = lines[0]
        who = f"({asked['character_name']}, {asked['speech_level']}; {asked['player_name']})"
        cells = [Text(visible(line["completion"]), overflow="fold") for line in lines]
        shown.add_row(Text(f"{visible(asked['user'])}\n{who}"), *cells)
    console.print(shown)


def verdict(stages: Sequence[Stage]) -> list[str]:
    """What each training changed, with intervals over the held-out turns."""
    start, sft, grpo = stages
    said = [
        f"SFT with the mended template: replies that do not end {_cut(start)} -> {_cut(sft)}.",
    ]
    for key, name in (("reward", "reward"), ("chrf", "chrF to the reference (never rewarded)")):
        both = zip(grpo.lines, sft.lines, strict=True)
        changes = [float(a[key]) - float(b[key]) for a, b in both]
        low, high = paired_interval(changes)
        said.append(
            f"GRPO: {name} {np.mean(changes):+.3f} a turn "
            f"(95 % interval of a paired bootstrap: {low:+.3f} to {high:+.3f})."
        )
    return said


def _cut(stage: Stage) -> str:
    share = mean_of([line["finish_reason"] == "length" for line in stage.lines])
    return "\N{EN DASH}" if share is None else f"{share:.0%}"
