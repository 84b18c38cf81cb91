"""Writes the tables and charts of the page of evidence from bench/results/rl_evidence.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from evidence.seeds import (
    PICTURES,
    Changes,
    cell,
    markdown_table,
    seeds_table,
    seeds_verdict,
    write_between,
)
from evidence.translation.arms import ARMS, ON_OMISSIONS
from scorekit.report.page import chart_image

BEGIN = "<!-- written by `python -m evidence.translation --report` -->"
END = "<!-- end of what is written -->"

BEGIN_OMISSIONS = "<!-- written by `python -m evidence.translation --omissions --report` -->"
END_OMISSIONS = "<!-- end of what is written on omissions -->"

#: Own reward above the start by so many paired standard errors counts as learned.
LEARNED = 5.0
_COLOURS = {"metricx": "C0", "spans": "C1", "both": "C2", "shuffled": "C7"}

Run = dict[str, Any]


def show(results: dict[str, Any]) -> None:
    """Print the tables on the terminal."""
    make_tables = omission_tables if _on_omissions(results) else tables
    Console(width=160).print(
        Markdown(make_tables(results))
    )  # its last lines say what the seeds show


def write_page(results: dict[str, Any]) -> None:
    """Put tables and pictures into docs/explanation/evidence/translation.md."""
    if _on_omissions(results):
        write_between(BEGIN_OMISSIONS, END_OMISSIONS, omission_tables(results))
        return
    names = write_images(results)
    image_links = "\n".join(f"![{title}](evidence/{name}.svg)" for name, title in names)
    write_between(BEGIN, END, f"{tables(results)}\n\n{image_links}")


def _on_omissions(results: dict[str, Any]) -> bool:
    return any(run["arm"] in ON_OMISSIONS.keys() - ARMS.keys() for run in results["runs"])


# -- tables -------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> str:
    """Return all tables, in Markdown."""
    runs = results["runs"]
    arms = [run for run in runs if not ARMS[run["arm"]].ablation]
    ablations = [run for run in runs if ARMS[run["arm"]].ablation]
    compared = [
        run for run in arms if run["seed"] == 1 and run["arm"] in ("both", "shuffled", "spans")
    ]
    parts = [
        f"Held out: {results['sources']} sources of `demo/data/{results['held_out']}`; "
        f"{results['updates']} updates a run; commit `{results['machine']['commit']}`.",
        "### Own reward",
        reward_table(arms),
        "### Against the references",
        quality_table(arms, results["start"]),
        "### Tokens that the start policy was penalised for",
        probe_table(arms),
        "### Where chrF changes: sources by what was wrong at the start",
        fault_table(arms),
        "### Ablations (seed 1)",
        reward_table([*compared, *ablations]),
        quality_table([*compared, *ablations], results["start"]),
        *seed_parts(arms),
    ]
    return "\n\n".join(parts)


def omission_tables(results: dict[str, Any]) -> str:
    """Return the tables of spans with and without omissions."""
    runs, start = results["runs"], results["start"]
    parts = [
        f"Held out: {results['sources']} sources of `demo/data/{results['held_out']}`; "
        f"{results['updates']} updates a run; commit `{results['machine']['commit']}`.",
        "Own reward:",
        reward_table(runs),
        "Against the references:",
        quality_table(runs, start),
        "What is left out (mean of a translation), and how long the text is:",
        omission_table(runs, start),
        "By what was wrong at the start:",
        fault_table(runs),
    ]
    return "\n\n".join(parts)


def omission_table(runs: Sequence[Run], start: dict[str, Any]) -> str:
    """Return how often something is left out, and how long the texts get during training."""
    updates = sorted({point["update"] for run in runs for point in run["curve"][1:]})
    head = ["arm", "seed", "penalty of omissions, end", "cut at the end"]
    head += [f"tokens (empty) after {update}" for update in updates]
    first = ["start", "", cell(start["omission"], 2), f"{100 * start['cut']:.0f} %"]
    rows = [first + [""] * len(updates)]
    for run in runs:
        end, points = run["curve"][-1], {point["update"]: point for point in run["curve"]}
        lengths = [
            f"{points[u]['tokens']:.1f} ({100 * points[u]['empty']:.0f} %)" if u in points else "–"
            for u in updates
        ]
        of_end = [cell(end["omission"], 2), f"{100 * end['cut']:.0f} %"]
        rows.append([run["title"], str(run["seed"]), *of_end, *lengths])
    return markdown_table(head, rows)


def seed_parts(runs: Sequence[Run]) -> list[str]:
    """Return tables and sentences with seeds as the unit; an empty list without the control.

    Two arms' own rewards have no common scale. chrF and the MetricX reward (5 - score) have one.
    """
    titles = dict.fromkeys(run["title"] for run in runs)
    control = ARMS["shuffled"].title
    if control not in titles:
        return []
    parts, verdicts = [], []
    for label, key, sign in (("chrF", "chrf", 1.0), ("MetricX reward", "metricx_score", -1.0)):
        arms: dict[str, Changes] = {
            title: {
                run["seed"]: sign * run["changes"][key]["change"]
                for run in runs
                if run["title"] == title
            }
            for title in titles
        }
        parts += [f"### {label}: change from the start, seeds as the unit"]
        parts += [seeds_table(arms, control, digits=2)]
        verdicts.append(seeds_verdict(label, arms, control))
    return [*parts, "### What the seeds show", *verdicts]


def reward_table(runs: Sequence[Run]) -> str:
    """Return whether each run gets more of its own reward."""
    head = [
        "arm",
        "seed",
        "own reward, start",
        "end",
        "change",
        "standard error",
        "change in standard errors",
        f"{LEARNED:g} or more",
    ]
    rows = []
    for run in runs:
        own_reward = run["own_reward"]
        rows.append(
            [
                run["title"],
                str(run["seed"]),
                f"{own_reward['before']:.3f}",
                f"{own_reward['after']:.3f}",
                f"{own_reward['change']:+.3f}",
                f"{own_reward['standard_error']:.3f}",
                f"{own_reward['errors']:+.1f}",
                "yes" if own_reward["errors"] >= LEARNED else "no",
            ]
        )
    return markdown_table(head, rows)


def quality_table(runs: Sequence[Run], start: dict[str, Any]) -> str:
    """Return the other quality stats; the first row is the start policy."""
    head = [
        "arm",
        "seed",
        "chrF",
        "change [95 %]",
        "BLEU",
        "change [95 %]",
        "MetricX",
        "xCOMET",
        "penalty a token",
        "spans",
        "critical",
        "tokens",
        "Korean letters",
        "copied",
        "empty",
        "KL",
    ]
    rows = [
        ["start", "", cell(start["chrf"], 2), "", cell(start["bleu"], 2), "", *_cells(start), ""]
    ]
    for run in runs:
        end = run["curve"][-1]
        rows.append(
            [
                run["title"],
                str(run["seed"]),
                cell(end["chrf"], 2),
                _with_interval(run["changes"]["chrf"]),
                cell(end["bleu"], 2),
                _with_interval(run["changes"]["bleu"]),
                *_cells(end),
                cell(run["kl"], 2),
            ]
        )
    return markdown_table(head, rows)


def _cells(stats: dict[str, Any]) -> list[str]:
    digits = {
        "metricx_score": 2,
        "xcomet_score": 3,
        "penalty": 2,
        "spans": 2,
        "spans_CRITICAL": 2,
        "tokens": 1,
    }
    shares = ("korean", "copied", "empty")
    return [cell(stats[name], d) for name, d in digits.items()] + [
        f"{100 * stats[name]:.0f} %" for name in shares
    ]


def probe_table(runs: Sequence[Run]) -> str:
    """Return how likely the start policy's own tokens still are."""
    head = [
        "arm",
        "seed",
        "log-prob. of penalised tokens, start",
        "end",
        "of other tokens, start",
        "end",
        "penalised against others, change [95 %]",
        "probability of penalised tokens",
        "of other tokens",
    ]
    rows = []
    for run in runs:
        probe = run["probe"]
        gap = probe["gap_logp"]
        hit, free = probe["hit_logp"], probe["free_logp"]
        rows.append(
            [
                run["title"],
                str(run["seed"]),
                cell(hit["before"], 2),
                cell(hit["after"], 2),
                cell(free["before"], 2),
                cell(free["after"], 2),
                _with_interval(gap),
                *(
                    f"{probe[name]['before']:.3f} → {probe[name]['after']:.3f}"
                    for name in ("hit_p", "free_p")
                ),
            ]
        )
    return markdown_table(head, rows)


def fault_table(runs: Sequence[Run]) -> str:
    """Return the sources in three groups, by the errors of the start policy."""
    names = list(runs[0]["groups"]) if runs else []
    head = ["arm", "seed"]
    for name in names:
        count = runs[0]["groups"][name]["sources"]
        head += [f"{name} ({count}): chrF", "MetricX", "length"]
    rows = []
    for run in runs:
        groups = [run["groups"][name] for name in names]
        cells = [
            f"{group[key][0]:.{d}f} → {group[key][1]:.{d}f}"
            for group in groups
            for key, d in (("chrf", 1), ("metricx_score", 1), ("length", 2))
        ]
        rows.append([run["title"], str(run["seed"]), *cells])
    return markdown_table(head, rows)


def _with_interval(change: dict[str, Any]) -> str:
    low, high = change["interval"]
    return f"{change['after'] - change['before']:+.2f} [{low:+.2f}, {high:+.2f}]"


# -- pictures -----------------------------------------------------------------------------------


def write_images(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Write the charts, and return (file name without suffix, title) of each."""
    runs = [run for run in results["runs"] if run["arm"] in _COLOURS]
    curves: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
        ("chrf", "held-out chrF", lambda point: point["chrf"]),
        ("metricx", "MetricX reward (5 - score)", lambda point: 5.0 - point["metricx_score"]),
        ("penalty", "span penalty of a token", lambda point: point["penalty"]),
        (
            "penalised",
            "log-probability: penalised minus other tokens",
            lambda point: point["probe_gap"],
        ),
    )
    PICTURES.mkdir(parents=True, exist_ok=True)
    names = []
    for name, title, value in curves:
        svg = chart_image(title, "update", partial(_curves, runs, value))
        if svg is not None:
            (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")
            names.append((name, title))
    return names


def _curves(runs: Sequence[Run], value: Callable[[dict[str, Any]], float], axes: Any) -> int:
    """Draw one line per run, one color per arm; return how many."""
    named: set[str] = set()
    for run in runs:
        points = [(point["update"], value(point)) for point in run["curve"]]
        label = None if run["arm"] in named else run["title"]
        named.add(run["arm"])
        axes.plot(
            *zip(*points, strict=True),
            color=_COLOURS[run["arm"]],
            label=label,
            linewidth=1.1,
            marker=".",
            markersize=3,
        )
    return len(runs)
