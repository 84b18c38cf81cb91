"""Writes the tables of the page on translation from the results, and says what they show."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table
from evidence.gain.arms import (
    ARMS,
    COOLER,
    CORE,
    LEAST_GAIN,
    LONGER,
    ROUND,
    SFT,
    SHUFFLED,
    START,
    TEMPERATURE,
)
from evidence.gain.data import Direction
from evidence.seeds import (
    PAGES,
    Changes,
    SeedInterval,
    against,
    bullet,
    read_runs,
    seed_interval,
    wrapped,
    write_section,
)
from scorekit.paired import mean_interval

PAGE = PAGES / "translation.md"
#: Gains in chrF for which the page says how many seeds and sources would show them.
EFFECTS = (0.5, 1.0, 2.0)
#: Errors of the power calculation: two-sided 5 %, and 80 % power.
_Z = 1.959964 + 0.841621
#: Fewest seeds that a table may show.
FEWEST_SEEDS = 3

Result = Mapping[str, Any]
#: Returns a number of the stats of a set.
Stat = Callable[[Mapping[str, Any]], float]


def greedy_chrf(stats: Mapping[str, Any]) -> float:
    """Return the mean sentence chrF of greedy translations."""
    return statistics.fmean(stats["greedy"])


def sampled_chrf(stats: Mapping[str, Any]) -> float:
    """Return the mean sentence chrF of samples."""
    return statistics.fmean(stats["sampled"])


def read_results(folder: Path) -> dict[str, Any]:
    """Return `runs`, the results of all runs, and the other files of the folder by name."""
    metadata = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in ("start", "headroom", "metrics")
        if (path := folder / f"{name}.json").is_file()
    }
    return {"runs": read_runs(folder), **metadata}


def balanced(runs: Sequence[Result]) -> list[Result]:
    """Return the runs of the seeds that all arms of CORE have, and what was made with the start."""
    arms_by_seed: dict[int, set[str]] = {}
    for run in runs:
        arms_by_seed.setdefault(run["seed"], set()).add(run["arm"])
    complete_seeds = {seed for seed, arms in arms_by_seed.items() if arms.issuperset(CORE)}
    return [run for run in runs if ARMS[run["arm"]].kind == "none" or run["seed"] in complete_seeds]


def parted(runs: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return the runs of arms with FEWEST_SEEDS seeds or more, and the others.

    What was made with the start is among both.
    """
    starts = [run for run in runs if ARMS[run["arm"]].kind == "none"]
    arms = {run["arm"] for run in runs}
    seeds = {arm: sum(run["arm"] == arm for run in runs) for arm in arms}
    trained = [run for run in runs if run not in starts]
    enough = [run for run in trained if seeds[run["arm"]] >= FEWEST_SEEDS]
    unfinished = [run for run in trained if seeds[run["arm"]] < FEWEST_SEEDS]
    return starts + enough, starts + unfinished


def changes_of(runs: Sequence[Result], name: str, stat: Stat) -> dict[str, dict[int, float]]:
    """Return arm -> seed -> change of a stat from the start, on the set of this name."""
    start = next(run for run in runs if run["arm"] == START)
    before = stat(start["sets"][name])
    out: dict[str, dict[int, float]] = {}
    for arm in ARMS:
        changes = {
            run["seed"]: stat(run["sets"][name]) - before for run in runs if run["arm"] == arm
        }
        if changes and arm != START:
            out[arm] = changes
    return out


def source_interval(runs: Sequence[Result], arm: str, other: str, name: str) -> tuple[float, float]:
    """Return the 95 % interval of arm - other with sources as the unit, seeds averaged."""

    def mean_of(which: str) -> Any:
        rows = [run["sets"][name]["greedy"] for run in runs if run["arm"] == which]
        return np.mean(np.array(rows), axis=0)

    return mean_interval(list(mean_of(arm) - mean_of(other)))


def needed(deviation: float, effect: float) -> int:
    """Return how many seeds or sources show an effect: two-sided 5 %, 80 % power.

    deviation: of one seed's or source's difference. The normal approximation, and two more for
    Student's t (Guenther 1981, "Sample Size Formulas for Normal Theory T Tests").
    """
    return math.ceil((_Z * deviation / effect) ** 2 + 1.959964**2 / 2)


# -- tables -------------------------------------------------------------------------------------


def main_table(runs: Sequence[Result], name: str) -> str:
    """Return the arms: greedy and sampled chrF, BLEU, length, reward and processor seconds."""
    start = next(run for run in runs if run["arm"] == START)["sets"][name]
    stats: list[tuple[Stat, int]] = [
        (greedy_chrf, 2),
        (sampled_chrf, 2),
        (lambda s: s["bleu"], 2),
        (lambda s: s["sampled_bleu"], 2),
        (lambda s: s["length"], 3),
        (lambda s: s["reward"], 3),
    ]
    rows = [[ARMS[START].title, "", *(f"{stat(start):.{d}f}" for stat, d in stats), ""]]
    changes = [(changes_of(runs, name, stat), digits) for stat, digits in stats]
    for arm in changes[0][0]:
        cells = [seed_interval(list(c[arm].values())).as_text(d) for c, d in changes]
        seeds = str(len(changes[0][0][arm]))
        rows.append([ARMS[arm].title, seeds, *cells, f"{processor_seconds(runs, arm):.0f}"])
        if ARMS[arm].kind == "none":
            rows[-1][1] = rows[-1][-1] = ""
    head = ["arm", "seeds", "greedy chrF", "mean sample", "BLEU", "BLEU of the samples"]
    return markdown_table([*head, "length", "reward", "processor s"], rows)


def processor_seconds(runs: Sequence[Result], arm: str) -> float:
    """Return the mean processor seconds of an arm, with those of the arm that it starts from."""
    spent = statistics.fmean(run["processor_seconds"] for run in runs if run["arm"] == arm)
    start = ARMS[arm].start
    has_start = any(run["arm"] == start for run in runs)
    return spent + processor_seconds(runs, start) if start and has_start else spent


def against_table(runs: Sequence[Result], name: str) -> str:
    """Return greedy chrF of each arm against the start, continued SFT and the shuffled control."""
    changes = changes_of(runs, name, greedy_chrf)
    rows = []
    for arm, values in changes.items():
        cells = [seed_interval(list(values.values())).as_text(2)]
        cells.append(_interval(source_interval(runs, arm, START, name)))
        for other in (SFT, SHUFFLED):
            less = None if other == arm or other not in changes else against(values, changes[other])
            cells.append("" if less is None else less.as_text(2))
        rows.append([ARMS[arm].title, _by_seed(values), *cells])
    head = ["greedy chrF", "seed by seed", "from the start", "sources as the unit"]
    return markdown_table([*head, "less continued SFT", "less the control"], rows)


def prompts_table(runs: Sequence[Result], inside: str, outside: str) -> str:
    """Return the gain on the training prompts beside that on unseen sources."""
    stats: list[tuple[str, Stat, int]] = [
        ("greedy chrF", greedy_chrf, 2),
        ("mean sample", sampled_chrf, 2),
        ("reward", lambda s: s["reward"], 3),
    ]
    rows = []
    for arm in changes_of(runs, outside, greedy_chrf):
        row = [ARMS[arm].title]
        for _, stat, digits in stats:
            for name in (inside, outside):
                values = list(changes_of(runs, name, stat)[arm].values())
                row.append(seed_interval(values).as_text(digits))
        rows.append(row)
    head = [
        f"{title}, {prompts_set}" for title, _, _ in stats for prompts_set in ("prompts", "unseen")
    ]
    return markdown_table(["arm", *head], rows)


def unfinished_table(runs: Sequence[Result], outside: str, inside: str) -> str:
    """Return the changes of arms with too few seeds, seed by seed; "" without any."""
    columns: list[tuple[str, Stat, str]] = [
        ("greedy chrF, unseen", greedy_chrf, outside),
        ("mean sample, unseen", sampled_chrf, outside),
        ("BLEU, unseen", lambda s: s["bleu"], outside),
        ("greedy chrF, prompts", greedy_chrf, inside),
        ("mean sample, prompts", sampled_chrf, inside),
    ]
    changes = [changes_of(runs, name, stat) for _, stat, name in columns]
    rows = [
        [ARMS[arm].title, *(_by_seed(column[arm]) for column in changes)]
        for arm in changes[0]
        if ARMS[arm].kind != "none"
    ]
    return markdown_table(["arm", *(title for title, _, _ in columns)], rows) if rows else ""


def _by_seed(changes: Changes) -> str:
    return ", ".join(f"{changes[seed]:+.2f}" for seed in sorted(changes))


def power_table(runs: Sequence[Result], name: str) -> str:
    """Return how many seeds, and how many sources, would show an effect.

    Over continued SFT, or over the start where continued SFT has too few seeds.
    """
    changes = changes_of(runs, name, greedy_chrf)
    other = SFT if SFT in changes else START
    below = changes.get(other, {})
    rows = []
    for arm, values in changes.items():
        both = sorted(values.keys() & below.keys()) if below else sorted(values)
        if arm == other or len(both) < 2:
            continue
        seeds = statistics.stdev([values[seed] - below.get(seed, 0.0) for seed in both])
        sources = _source_deviation(runs, arm, other, name)
        cells = [f"{needed(seeds, e)} / {needed(sources, e)}" for e in EFFECTS]
        rows.append([ARMS[arm].title, f"{seeds:.2f}", f"{sources:.1f}", *cells])
    head = [f"less {ARMS[other].title}", "deviation of a seed", "deviation of a source"]
    return markdown_table([*head, *(f"+{effect:g}: seeds / sources" for effect in EFFECTS)], rows)


def _source_deviation(runs: Sequence[Result], arm: str, other: str, name: str) -> float:
    """Return the deviation of a source's difference between two arms, seeds averaged."""
    means = [
        np.mean([run["sets"][name]["greedy"] for run in runs if run["arm"] == which], axis=0)
        for which in (arm, other)
    ]
    return float(np.std(means[0] - means[1], ddof=1))


def headroom_table(headroom: Mapping[str, Any]) -> str:
    """Return the rows of headroom.json."""
    rows = []
    for choice in headroom["choices"]:
        chrf, bleu, rho = choice["chrf"], choice["bleu"], choice["rank_correlation"]
        change = "" if choice["name"] == "greedy" else _change(chrf)
        cells = [f"{choice['reward']['second']:.2f}", f"{chrf['second']:.2f}", change]
        cells += [f"{bleu['second']:.2f}", f"{rho[0]:.2f}" if rho else ""]
        rows.append([choice["name"], *cells, f"{choice['length']:.2f}"])
    head = ["choice", "reward", "chrF", "change from greedy", "BLEU", "rho", "length"]
    return markdown_table(head, rows)


def start_table(start: Mapping[str, Any]) -> str:
    """Return the curve of the start's own SFT."""
    rows = [
        [
            line["stage"] + (" (frozen)" if line["stage"] == start["chosen"] else ""),
            f"{line['chrf']:.2f}",
            f"{line['bleu']:.2f}",
            f"{line['loss']:.3f}",
        ]
        for line in start["curve"]
    ]
    table = markdown_table(["stage", "chrF", "BLEU", "loss of a reference's token"], rows)
    stages = {line["stage"]: line["chrf"] for line in start["curve"]}
    rise = start["curve"][-1]["chrf"] - stages[start["chosen"]]
    if rise < LEAST_GAIN:
        return table
    return f"{table}\n\n" + wrapped(
        f"**The round after the frozen one rose by {rise:.2f} more: SFT was not quite at its end.**"
    )


def _change(stat: Mapping[str, Any]) -> str:
    text = f"{stat['difference']:+.2f}"
    return text if stat["low"] is None else f"{text} [{stat['low']:+.2f}, {stat['high']:+.2f}]"


def _interval(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:+.2f}, {interval[1]:+.2f}]"


# -- what they say ------------------------------------------------------------------------------


def verdicts(runs: Sequence[Result], outside: str, inside: str) -> list[str]:
    """Return sentences that say what the table shows, computed from its numbers."""
    chrf = changes_of(runs, outside, greedy_chrf)
    sampled = changes_of(runs, outside, sampled_chrf)
    bleu = changes_of(runs, outside, lambda s: float(s["bleu"]))
    prompts = changes_of(runs, inside, greedy_chrf)
    tried = [arm for arm in chrf if arm not in (SFT, SHUFFLED) and len(chrf[arm]) >= FEWEST_SEEDS]
    if not tried:
        return [f"No arm has {FEWEST_SEEDS} seeds yet: nothing is shown."]
    num_seeds = min(len(chrf[arm]) for arm in tried)
    above_start = [arm for arm in tried if _rises(_over(chrf[arm]))]
    above_sft = [arm for arm in above_start if _rises(against(chrf[arm], chrf.get(SFT, {})))]
    raised_arms = [arm for arm in above_sft if not _falls(_over(bleu[arm]))]
    out = [f"Seeds: {num_seeds}. Sources: {len(runs[0]['sets'][outside]['greedy'])} unseen ones."]
    if raised_arms:
        out.append(
            f"Greedy chrF rises above the frozen start and above continued SFT, and BLEU does not "
            f"fall: {_titles(raised_arms)}."
        )
    else:
        out.append(
            "No arm is shown to raise greedy chrF above both the frozen start and continued SFT."
        )
    if SFT not in chrf:
        out.append(
            f"Continued SFT has fewer than {FEWEST_SEEDS} seeds: nothing is shown against it."
        )
    out.append(f"Above the frozen start in greedy chrF, clear of 0: {_titles(above_start)}.")
    out.append(
        f"Above continued SFT in greedy chrF, clear of 0: "
        f"{_titles([a for a in tried if _rises(against(chrf[a], chrf.get(SFT, {})))])}."
    )
    out.append(
        f"Above the start in the mean sample, clear of 0: "
        f"{_titles([a for a in tried if _rises(_over(sampled[a]))])}."
    )
    if SFT in sampled:
        names = [a for a in tried if _rises(against(sampled[a], sampled[SFT]))]
        out.append(f"Above continued SFT in the mean sample, clear of 0: {_titles(names)}.")
    if SHUFFLED in chrf:
        names = [a for a in tried if _rises(against(chrf[a], chrf[SHUFFLED]))]
        out.append(f"Above the shuffled control in greedy chrF, clear of 0: {_titles(names)}.")
    if ROUND in chrf:
        gain = _over(chrf[ROUND]).mean
        names = [a for a in tried if _rises(seed_interval([v - gain for v in chrf[a].values()]))]
        out.append(
            f"The next round of the start's own SFT, one run: {gain:+.2f} greedy chrF, "
            f"{_over(sampled[ROUND]).mean:+.2f} in the mean sample. Above it in greedy chrF, with "
            f"all seeds of an arm against that one run: {_titles(names)}."
        )
    if LONGER in chrf:
        gain = _over(chrf[LONGER]).mean
        names = [a for a in tried if _rises(seed_interval([v - gain for v in chrf[a].values()]))]
        out.append(
            f"The start itself with later ends, whose greedy translations are longer: {gain:+.2f} "
            f"greedy chrF. Above it, with all seeds of an arm: {_titles(names)}."
        )
        gain = _over(sampled[LONGER]).mean
        names = [a for a in tried if _rises(seed_interval([v - gain for v in sampled[a].values()]))]
        out.append(f"The same in the mean sample: {gain:+.2f}. Above it: {_titles(names)}.")
    if COOLER in sampled:
        out.append(
            f"The start itself, sampled at temperature {ARMS[COOLER].temperature} in place of "
            f"{TEMPERATURE}: {_over(sampled[COOLER]).mean:+.2f} in the mean sample."
        )
    fallen = [arm for arm in tried if _falls(_over(chrf[arm]))]
    out.append(f"Below the frozen start in greedy chrF, clear of 0: {_titles(fallen)}.")
    out.append(
        f"On the training prompts, greedy chrF above the start, clear of 0: "
        f"{_titles([a for a in tried if _rises(_over(prompts[a]))])}."
    )
    fallen = [arm for arm in tried if _falls(_over(bleu[arm]))]
    out.append(f"BLEU below the start, clear of 0: {_titles(fallen)}.")
    sampled_bleu = changes_of(runs, outside, lambda s: float(s["sampled_bleu"]))
    fallen = [arm for arm in tried if _falls(_over(sampled_bleu[arm]))]
    out.append(f"BLEU of the samples below the start, clear of 0: {_titles(fallen)}.")
    if SFT in bleu:
        less = {a: against(bleu[a], bleu[SFT]) for a in tried}
        parts = [f"*{ARMS[a].title}* {v.as_text(2)}" for a, v in less.items() if v is not None]
        out.append(f"BLEU less continued SFT: {'; '.join(parts)}.")
    return out


def _over(changes: Changes) -> SeedInterval:
    return seed_interval(list(changes.values()))


def _rises(interval: SeedInterval | None) -> bool:
    return interval is not None and interval.is_clear and interval.mean > 0


def _falls(interval: SeedInterval | None) -> bool:
    return interval is not None and interval.is_clear and interval.mean < 0


def _titles(arms: Sequence[str]) -> str:
    return "; ".join(f"*{ARMS[arm].title}*" for arm in arms) or "none"


# -- the page -----------------------------------------------------------------------------------


def sets_of(runs: Sequence[Result]) -> tuple[str, str]:
    """Return the names of the sets of unseen sources and of training prompts."""
    names = list(runs[0]["sets"])
    return names[0], names[-1]


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the page, in Markdown."""
    parts = []
    if "start" in results:
        parts += [
            "### The start: its own SFT, on the development set",
            start_table(results["start"]),
        ]
    if "headroom" in results:
        headroom = results["headroom"]
        title = f"### Headroom: {headroom['samples']} samples of {headroom['sources']} sources"
        parts += [f"{title} of the development set", headroom_table(headroom)]
    if not any(run["arm"] == START for run in results["runs"]):
        return "\n\n".join(parts)
    runs, unfinished = parted(balanced(results["runs"]))
    outside, inside = sets_of(runs)
    touched = len([run for run in results["runs"] if outside in run["sets"]])
    parts += [
        "### Unseen sources: change from the frozen start, mean of the seeds [95 %]",
        main_table(runs, outside),
        "### Against the controls",
        against_table(runs, outside),
        "### The training prompts beside unseen sources",
        prompts_table(runs, inside, outside),
        *_unfinished(unfinished, outside, inside),
        "### How many seeds or sources would show a gain",
        power_table(runs, outside),
        wrapped(
            f"The test set was translated {touched} times: once for each run and once for the "
            f"start. Commit `{runs[-1]['commit']}`. All runs together: "
            f"{sum(run['processor_seconds'] for run in results['runs']) / 3600:.2f} core-hours."
        ),
        "### What the tables say",
        "\n".join(bullet(line) for line in verdicts(runs, outside, inside)),
    ]
    return "\n\n".join(parts)


def _unfinished(unfinished: Sequence[Result], outside: str, inside: str) -> list[str]:
    """Return the part on arms with too few seeds."""
    table = unfinished_table(unfinished, outside, inside)
    title = f"### Fewer than {FEWEST_SEEDS} seeds: what each run did, and no result"
    return [title, table] if table else []


def show(results: Mapping[str, Any]) -> None:
    """Print the tables. The last lines say what they show."""
    Console(width=160).print(Markdown(tables(results)))


def marks(direction: Direction) -> tuple[str, str]:
    """Return the lines between which the page has a direction's tables."""
    option = f" --direction {direction.name}" if direction.is_reversed else ""
    begin = f"<!-- written by `python -m evidence.gain{option} --report` -->"
    return begin, f"<!-- end of what is written on the gain{option} -->"


def write_page(results: Mapping[str, Any], direction: Direction) -> None:
    """Put the tables of a direction into docs/explanation/evidence/translation.md."""
    write_section(direction.title, *marks(direction), tables(results), PAGE)
