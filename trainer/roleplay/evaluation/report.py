"""The pages: report.html of a run, evaluation.html of a policy, comparison.html of two.

trainer/runs/evaluation/pages.py has what the tasks share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scorekit.paired import PairedStat, largest_changes
from trainer.roleplay.evaluation.diagnostics import STRETCH
from trainer.roleplay.evaluation.stats import curves, table
from trainer.runs.evaluation.files import lines_by_set
from trainer.runs.evaluation.pages import (
    TaskPages,
    draw_curves,
    first_and_last,
    read_run,
    set_values,
)

Line = Mapping[str, Any]
#: (title, pairs of lines)
Changes = tuple[str, list[tuple[Line, Line]]]
_MAX_EXAMPLES = 12  # examples of each kind
_QUOTES = '"“”'


def write_report(
    run_dir: str | Path, title: str = "Role-play training", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` into a run's folder and return its path.

    notes: paragraphs for the top of the page.
    Raises UserError if the folder has no run.
    """
    folder = Path(run_dir)
    updates, evals = read_run(folder)
    sets = lines_by_set(evals)
    return _pages().write_run(
        folder,
        updates,
        [
            set_values(name, lines, table(), _run_examples(folder, lines))
            for name, lines in sets.items()
        ],
        curves=draw_curves(curves(), updates, sets),
        title=title,
        notes=notes,
    )


def _run_examples(folder: Path, evals: Sequence[dict[str, Any]]) -> list[Changes]:
    if len(evals) < 2:
        return []
    return changed_most(*first_and_last(folder, evals, "turns", lambda line: line["id"]))


def write_evaluation(
    path: Path, policy: str, stats: Mapping[str, Any], lines: Sequence[Line], config: str = ""
) -> Path:
    """Write a page of the stats of an evaluation, its worst replies and its first ones."""
    worst = sorted(lines, key=lambda line: line["reward"])[:_MAX_EXAMPLES]
    examples = [("Worst by the reward", worst), ("The first of the set", lines[:_MAX_EXAMPLES])]
    return _pages().write_evaluation(path, policy, stats, table(), examples, config=config)


def write_comparison(
    path: Path,
    names: tuple[str, str],
    groups: Mapping[str, Sequence[PairedStat]],
    first: Sequence[Line],
    second: Sequence[Line],
) -> Path:
    """Write a page of the intervals of the differences, and of the largest changes."""
    return _pages().write_comparison(path, names, groups, changed_most(first, second))


def changed_most(first: Sequence[Line], second: Sequence[Line]) -> list[Changes]:
    """Return (title, pairs of lines): largest gains and losses of reward, and the first of the
    set."""
    pairs = list(zip(first, second, strict=True))
    changed = largest_changes(pairs, lambda line: line["reward"], " by the reward", _MAX_EXAMPLES)
    return [*(changed or ()), ("The first of the set", pairs[:_MAX_EXAMPLES])]


def _pages() -> TaskPages:
    return TaskPages(
        macros="trainer/roleplay/evaluation/macros.html",
        units="turns",
        answer="reply",
        filters={"parts": _parts, "scores": _scores, "reasons": _reasons, "told": _speakers},
        values={"stretch": STRETCH},
    )


def _parts(line: Line) -> list[dict[str, str]]:
    """Return the lines of a reply for the template; lines without quotation marks are narration."""
    return [
        {"text": text, "kind": "" if any(mark in text for mark in _QUOTES) else "narration"}
        for text in line["completion"].splitlines()
        if text.strip()
    ]


def _scores(line: Line) -> str:
    """Return the rewards of a reply, by function, and its chrF."""
    texts = [
        f"{name.removeprefix('reward_').replace('_', ' ')} {value:.2f}"
        for name, value in line["rewards"].items()
    ]
    chrf = [] if line.get("chrf") is None else [f"chrF {line['chrf']:.0f}"]
    return " · ".join([f"reward {line['reward']:.3f}", *texts, *chrf])


def _reasons(line: Line) -> Iterator[str]:
    for name, reasons in line["reasons"].items():
        if reasons:
            yield f"{name.removeprefix('reward_').replace('_', ' ')}: {'; '.join(reasons)}"


def _speakers(line: Line) -> str:
    """Return the names and the speech level."""
    names = [line.get("player_name"), line.get("character_name"), line.get("speech_level")]
    return " · ".join(name for name in names if name)
