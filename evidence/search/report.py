"""Writes the tables of the page of evidence on search, and says what they show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from evidence.gain.report import needed
from evidence.search.arms import ARMS, CONTROL, NEW, SFT, SLOW_SFT, START
from evidence.seeds import (
    PAGES,
    Changes,
    SeedInterval,
    against,
    cell,
    mean_of_known,
    read_runs,
    seed_interval,
    wrapped,
)
from scorekit.paired import mean_interval

PAGE = PAGES / "search.md"
BEGIN = "<!-- written by `python -m evidence.search --report` -->"
END = "<!-- end of what is written on search -->"
#: Column of the first table -> figure and digits.
COLUMNS = {
    "right": ("right", 3),
    "small print": ("small_print", 3),
    "NDCG": ("ndcg", 3),
    "gold seen": ("gold_seen", 3),
    "own ends": ("own_ends", 3),
    "turns": ("turns", 2),
    "crops": ("crops", 2),
    "invalid": ("invalid", 2),
    "forced": ("forced", 3),
    "coverage": ("coverage", 3),
}
#: Figures whose changes are told with an interval over seeds. The first one is claimed.
CHANGED = {
    "right": "right",
    "small print": "small_print",
    "NDCG": "ndcg",
    "own ends": "own_ends",
}
#: Arms that the others are compared with -> how a table and a sentence say it.
RIVALS = {
    CONTROL: "less the shuffled control",
    SFT: "less SFT",
    SLOW_SFT: "less SFT at a tenth of the rate",
}
#: Gains for which the page says how many seeds and questions would show them.
EFFECTS = (0.05, 0.1)
#: Fewest seeds of a claim.
FEWEST_SEEDS = 3
#: Column of the table of updates -> key of the log and digits.
BY_UPDATE = {
    "entropy": ("entropy_est", 3),
    "tokens": ("tokens_mean", 0),
    "turns": ("turns_mean", 2),
    "invalid": ("invalid_mean", 2),
    "crops": ("crops_mean", 2),
    "reward": ("reward_mean", 3),
    "KL of an update": ("approx_kl", 4),
}

Run = Mapping[str, Any]


def read_results(folder: Path) -> dict[str, Any]:
    """Return `runs`: the results of all runs of a folder."""
    return {"runs": read_runs(folder)}


def show(results: Mapping[str, Any]) -> None:
    """Print the tables. The last lines say what they show."""
    Console(width=160).print(Markdown(tables(results)))


def write_page(results: Mapping[str, Any]) -> None:
    """Put the tables into docs/explanation/evidence/search.md."""
    write_between(BEGIN, END, tables(results), PAGE)


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the page in Markdown; a sentence if there is no start to compare."""
    runs: Sequence[Run] = results["runs"]
    starts = [run for run in runs if run["arm"] == START]
    if not starts or len(runs) < 2:
        return "Not run yet."
    (set_name,) = starts[0]["sets"]
    questions = starts[0]["sets"][set_name]["questions"]
    spent = sum(run["processor_seconds"] + run["measuring_seconds"] for run in runs) / 3600
    touched = sum(NEW in run["sets"] for run in runs)
    return "\n\n".join(
        [
            f"### What each policy does with {questions} questions",
            "Greedy episodes, the mean of the seeds. *Coverage* is the share of episodes whose "
            "answer was judged.",
            ends_table(runs, set_name),
            "### Change from the start, seeds as the unit",
            *(f"{changes_table(runs, set_name, name)}" for name in CHANGED),
            "### Training, update by update",
            "Of the samples in training, the mean of the seeds.",
            updates_table(runs),
            "### How many seeds or questions would show a gain in right answers",
            power_table(runs, set_name),
            wrapped(
                f"New documents were measured {touched} times: once for each run and once for the "
                f"start. All runs together: {spent:.2f} core-hours."
            ),
            "### What the tables say",
            "\n".join(
                wrapped(f"- {line}").replace("\n", "\n  ") for line in verdicts(runs, set_name)
            ),
        ]
    )


def of_arm(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    """Return seed -> run of an arm."""
    return {run["seed"]: run for run in runs if run["arm"] == arm}


def start_of(runs: Sequence[Run], set_name: str) -> Mapping[str, Any]:
    """Return the figures of the start."""
    return next(run["sets"][set_name] for run in runs if run["arm"] == START)


def changes_of(runs: Sequence[Run], set_name: str, key: str) -> dict[str, Changes]:
    """Return arm -> its change of a figure from the start by seed, in the order of ARMS.

    Without a value at either end there is no change: three questions may have no small print.
    """
    start = start_of(runs, set_name)[key]
    changes: dict[str, Changes] = {}
    for arm in ARMS:
        ends = {seed: run["sets"][set_name][key] for seed, run in of_arm(runs, arm).items()}
        values = {seed: end - start for seed, end in ends.items() if None not in (end, start)}
        if values and ARMS[arm].kind != "none":
            changes[arm] = values
    return changes


def ends_table(runs: Sequence[Run], set_name: str) -> str:
    """Return a table of the figures after training, and of the start."""
    rows = []
    for arm, description in ARMS.items():
        by_seed = list(of_arm(runs, arm).values())
        if not by_seed:
            continue
        cells = [
            cell(mean_of_known([run["sets"][set_name][key] for run in by_seed]), digits)
            for key, digits in COLUMNS.values()
        ]
        entropies = [run["by_update"]["entropy_est"][-1] for run in by_seed if run["by_update"]]
        count = "" if description.kind == "none" else str(len(by_seed))
        seconds = f"{statistics.fmean(run['processor_seconds'] for run in by_seed):.0f}"
        cells += [cell(mean_of_known(entropies), 3), "" if description.kind == "none" else seconds]
        rows.append([description.title, count, *cells])
    return markdown_table(["", "seeds", *COLUMNS, "entropy at the end", "processor s"], rows)


def changes_table(runs: Sequence[Run], set_name: str, name: str) -> str:
    """Return a table of the changes of a figure by seed, and less each rival that was run."""
    changes, rows = changes_of(runs, set_name, CHANGED[name]), []
    rivals = [rival for rival in RIVALS if rival in changes]
    for arm, by_seed in changes.items():
        cells = [", ".join(f"{by_seed[seed]:+.3f}" for seed in sorted(by_seed))]
        cells.append(_as_text(seed_interval(list(by_seed.values()))))
        for other in rivals:
            less = None if other == arm else against(by_seed, changes[other])
            cells.append(_as_text(less))
        if name == "right":
            cells.append(_questions_cell(runs, set_name, arm))
        rows.append([ARMS[arm].title, *cells])
    head = [f"{name}: change", "seed by seed", "mean of the seeds [95 %]"]
    head += [f"{RIVALS[other]}, paired by seed" for other in rivals]
    return markdown_table([*head, *(["questions as the unit"] if name == "right" else [])], rows)


def updates_table(runs: Sequence[Run]) -> str:
    """Return what training saw at its first, its middle and its last update."""
    rows = []
    for arm, description in ARMS.items():
        logs = [run["by_update"] for run in of_arm(runs, arm).values() if run["by_update"]]
        count = min((len(log["reward_mean"]) for log in logs), default=0)
        for update in sorted({0, (count - 1) // 2, count - 1}) if count else ():
            cells = [
                cell(mean_of_known([log[key][update] for log in logs]), digits)
                for key, digits in BY_UPDATE.values()
            ]
            rows.append([description.title, str(update + 1), *cells])
    return markdown_table(["", "update", *BY_UPDATE], rows)


def power_table(runs: Sequence[Run], set_name: str) -> str:
    """Return how many seeds, and how many questions, would show an effect over a rival."""
    changes, rows, pairs = changes_of(runs, set_name, "right"), [], set()
    for rival in RIVALS:
        for arm, by_seed in changes.items():
            both, pair = sorted(by_seed.keys() & changes.get(rival, {}).keys()), {arm, rival}
            if len(pair) < 2 or frozenset(pair) in pairs or ARMS[arm].dealt or len(both) < 2:
                continue
            pairs.add(frozenset(pair))
            deviation = statistics.stdev([by_seed[seed] - changes[rival][seed] for seed in both])
            of_question = statistics.stdev(_differences(runs, set_name, arm, rival))
            cells = [f"{needed(deviation, e)} / {needed(of_question, e)}" for e in EFFECTS]
            title = f"{ARMS[arm].title}, less {ARMS[rival].title}"
            rows.append([title, str(len(both)), f"{deviation:.3f}", f"{of_question:.2f}", *cells])
    if not rows:
        return "No arm has two seeds beside a rival yet."
    head = ["", "seeds", "deviation of a seed", "deviation of a question"]
    return markdown_table([*head, *(f"+{effect:g}: seeds / questions" for effect in EFFECTS)], rows)


def verdicts(runs: Sequence[Run], set_name: str) -> list[str]:
    """Return sentences that say what the tables show, computed from their numbers."""
    changes = changes_of(runs, set_name, "right")
    tried = [arm for arm in changes if ARMS[arm].kind == "rl" and ARMS[arm].dealt is None]
    enough = [arm for arm in tried if len(changes[arm]) >= FEWEST_SEEDS]
    if not enough:
        return [f"No arm has {FEWEST_SEEDS} seeds yet: nothing is shown."]
    lines = []
    for arm in enough:
        from_start = seed_interval(list(changes[arm].values()))
        parts = [f"{_as_text(from_start)} from the start{_clear(from_start)}"]
        for rival, title in RIVALS.items():
            less = against(changes[arm], changes.get(rival, {}))
            if less is None or less.low is None:
                parts.append(f"{title}: too few seeds")
            else:
                parts.append(f"{_as_text(less)} {title}{_clear(less)}")
        lines.append(f"*{ARMS[arm].title}*, right answers: {'; '.join(parts)}.")
    if CONTROL in changes:
        drift = list(changes[CONTROL].values())
        lines.append(
            f"The shuffled control ends at {min(drift):+.3f} to {max(drift):+.3f} right answers."
        )
    missing = [ARMS[arm].title for arm in ARMS if len(changes.get(arm, {})) < FEWEST_SEEDS]
    missing.remove(ARMS[START].title)
    if missing:
        names = "; ".join(f"*{title}*" for title in missing)
        lines.append(f"Fewer than {FEWEST_SEEDS} seeds, so nothing is shown: {names}.")
    return lines


def question_values(runs: Sequence[Run], set_name: str, arm: str) -> list[float | None]:
    """Return for each question the share of the seeds that are right; None if none was judged."""
    strings = [run["sets"][set_name]["of_questions"] for run in of_arm(runs, arm).values()]
    return [
        mean_of_known([None if c == "-" else float(c) for c in col])
        for col in zip(*strings, strict=True)
    ]


def _differences(runs: Sequence[Run], set_name: str, arm: str, rival: str) -> list[float]:
    pairs = zip(
        question_values(runs, set_name, arm), question_values(runs, set_name, rival), strict=True
    )
    return [a - b for a, b in pairs if a is not None and b is not None]


def _questions_cell(runs: Sequence[Run], set_name: str, arm: str) -> str:
    low, high = mean_interval(_differences(runs, set_name, arm, START))
    return f"[{low:+.3f}, {high:+.3f}]"


def _as_text(interval: SeedInterval | None) -> str:
    return "" if interval is None else interval.as_text()


def _clear(interval: SeedInterval) -> str:
    return " (clear of 0)" if interval.is_clear else ""
