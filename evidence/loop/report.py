"""Writes the section on curation of the page on the loop, and says what it shows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from evidence.gain.report import needed
from evidence.loop.curation import ARMS, FIRST, LOOP, PLAIN, RANDOM
from evidence.search.report import of_arm
from evidence.seeds import (
    PAGES,
    Changes,
    against,
    bullet,
    cell,
    mean_of_known,
    read_runs,
    seed_interval,
    wrapped,
)
from scorekit.errors import UserError

PAGE = PAGES / "loop.md"
BEGIN = "<!-- written by `python -m evidence.loop --report` -->"
END = "<!-- end of what is written on the loop -->"
#: Column of the first table -> stat and digits.
COLUMNS = {
    "right": ("right", 3),
    "small print": ("small_print", 3),
    "NDCG": ("ndcg", 3),
    "gold seen": ("gold_seen", 3),
    "turns": ("turns", 2),
    "own ends": ("own_ends", 3),
    "coverage": ("coverage", 3),
}
#: Of what a second round learned -> title.
DATA = {
    "questions": "questions",
    "sft_rows": "SFT rows",
    "sft_tokens": "their tokens",
    "updates": "updates",
    "rl_tokens": "tokens of them",
}
#: Stats whose changes have an interval over seeds.
CHANGED = {
    "right": "right answers",
    "small_print": "right answers about small print",
    "ndcg": "NDCG",
}
RIVALS = {PLAIN: "less plain training", RANDOM: "less random rows"}
EFFECTS = (0.02, 0.05, 0.1)
#: Fewest seeds of a claim.
FEWEST_SEEDS = 3

Run = Mapping[str, Any]


def read_results(folder: Path) -> Sequence[Run]:
    """Return the results of all runs of a folder. Raises UserError if there is none."""
    runs = read_runs(folder)
    if not runs:
        raise UserError(f"{folder}: has no result yet. Run this without --report first")
    return runs


def show(runs: Sequence[Run]) -> None:
    """Print the tables. The last lines say what they show."""
    Console(width=160).print(Markdown(tables(runs)))


def write_page(runs: Sequence[Run]) -> None:
    """Put the tables into docs/explanation/evidence/loop.md."""
    write_between(BEGIN, END, tables(runs), PAGE)


def tables(runs: Sequence[Run]) -> str:
    """Return the section in Markdown."""
    spent = sum(run["processor_seconds"] + run["measuring_seconds"] for run in runs) / 3600
    questions = runs[0]["stats"]["questions"]
    commits = ", ".join(sorted({f"`{run['commit']}`" for run in runs}))
    return "\n\n".join(
        [
            wrapped(
                f"{questions} questions, greedy, the mean of the seeds. Each policy was measured "
                f"once: {len(runs)} times in all. Trainings and measurements: {spent:.2f} "
                f"core-hours. Commit {commits}."
            ),
            ends_table(runs),
            "What the second round learned from, the mean of the seeds:",
            data_table(runs),
            *(changes_table(runs, key) for key in CHANGED),
            wrapped(
                "How many seeds would show a gain of this size in right answers (two-sided 5 %, "
                "80 % power), and how many questions would, for these policies:"
            ),
            power_table(runs),
            "\n".join(bullet(line) for line in verdicts(runs)),
        ]
    )


def changes_of(runs: Sequence[Run], key: str) -> dict[str, Changes]:
    """Return arm -> seed -> change of a stat since the first round of the same seed.

    Without a value at either end there is no change: three questions may have no small print.
    """
    before = {seed: run["stats"][key] for seed, run in of_arm(runs, FIRST).items()}
    changes = {
        name: {
            seed: run["stats"][key] - before[seed]
            for seed, run in of_arm(runs, name).items()
            if None not in (run["stats"][key], before.get(seed))
        }
        for name in ARMS
        if name != FIRST
    }
    return {name: by_seed for name, by_seed in changes.items() if by_seed}


def ends_table(runs: Sequence[Run]) -> str:
    """Return the stats of each arm."""
    rows = []
    for name, title in ARMS.items():
        if by_seed := list(of_arm(runs, name).values()):
            cells = [
                cell(mean_of_known([run["stats"][key] for run in by_seed]), digits)
                for key, digits in COLUMNS.values()
            ]
            rows.append([title, str(len(by_seed)), *cells])
    return markdown_table(["", "seeds", *COLUMNS], rows)


def data_table(runs: Sequence[Run]) -> str:
    """Return what the arms learned from after the first round."""
    rows = []
    for name, title in ARMS.items():
        if name != FIRST and (by_seed := list(of_arm(runs, name).values())):
            cells = [
                cell(mean_of_known([run["data"].get(key) for run in by_seed]), 0) for key in DATA
            ]
            rows.append([title, *cells])
    return markdown_table(["", *DATA.values()], rows)


def changes_table(runs: Sequence[Run], key: str) -> str:
    """Return the changes of a stat by seed, and less each rival."""
    changes, rows = changes_of(runs, key), []
    for name, by_seed in changes.items():
        cells = [", ".join(f"{by_seed[seed]:+.3f}" for seed in sorted(by_seed))]
        cells.append(seed_interval(list(by_seed.values())).as_text())
        for rival in RIVALS:
            less = None if rival == name else against(by_seed, changes.get(rival, {}))
            cells.append("" if less is None else less.as_text())
        rows.append([ARMS[name], *cells])
    if not rows:
        return f"{CHANGED[key]}: no change is known."
    head = [f"{CHANGED[key]}: change since the first round", "seed by seed", "mean [95 %]"]
    return markdown_table([*head, *(f"{title}, paired by seed" for title in RIVALS.values())], rows)


def power_table(runs: Sequence[Run]) -> str:
    """Return how many seeds, and how many questions, would show an effect of the loop."""
    changes, rows = changes_of(runs, "right"), []
    for rival, title in RIVALS.items():
        loop, other = changes.get(LOOP, {}), changes.get(rival, {})
        both = sorted(loop.keys() & other.keys())
        if len(both) > 1:
            deviation = statistics.stdev([loop[seed] - other[seed] for seed in both])
            of_question = statistics.stdev(_by_question(runs, LOOP, rival))
            cells = [f"{needed(deviation, e)} / {needed(of_question, e)}" for e in EFFECTS]
            rows.append([f"the loop {title}", f"{deviation:.3f}", f"{of_question:.2f}", *cells])
    head = ["", "deviation of a seed", "deviation of a question"]
    return markdown_table([*head, *(f"+{effect:g}: seeds / questions" for effect in EFFECTS)], rows)


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return sentences that say what the tables show, computed from their numbers."""
    lines = []
    for key, title in CHANGED.items():
        changes = changes_of(runs, key)
        loop = changes.get(LOOP, {})
        if len(loop) < FEWEST_SEEDS:
            words = f"The loop, {title}: fewer than {FEWEST_SEEDS} seeds, so nothing is shown."
            lines.append(words)
            continue
        parts = [("since the first round", seed_interval(list(loop.values())))]
        for rival, text in RIVALS.items():
            less = against(loop, changes.get(rival, {}))
            parts += [] if less is None else [(text, less)]
        texts = (
            f"{interval.as_text()} {text} ({_relation(interval.is_clear, interval.mean)})"
            for text, interval in parts
        )
        lines.append(f"The loop, {title}, {len(loop)} seeds: {'; '.join(texts)}.")
    return lines


def _relation(is_clear: bool, mean: float) -> str:
    if not is_clear:
        return "not shown"
    return "above" if mean > 0 else "below"


def _by_question(runs: Sequence[Run], name: str, rival: str) -> list[float]:
    """Return the difference of two arms in each question that both have a judgement of."""
    first, second = (_question_values(runs, arm) for arm in (name, rival))
    pairs = zip(first, second, strict=True)
    return [a - b for a, b in pairs if a is not None and b is not None]


def _question_values(runs: Sequence[Run], name: str) -> list[float | None]:
    strings = [run["stats"]["of_questions"] for run in of_arm(runs, name).values()]
    return [
        mean_of_known([None if letter == "-" else float(letter) for letter in column])
        for column in zip(*strings, strict=True)
    ]
