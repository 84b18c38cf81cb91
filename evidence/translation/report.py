"""Writes the tables and charts of the page on translation from the results alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from evidence.seeds import (
    PAGES,
    Changes,
    cell,
    seeds_table,
    seeds_verdict,
    spread,
    spread_shares,
    wrapped,
)
from evidence.translation.arms import ARMS, ON_OMISSIONS
from scorekit.report.page import chart_image

PAGE = PAGES / "translation.md"
BEGIN = "<!-- written by `python -m evidence.translation --report` -->"
END = "<!-- end of what is written -->"

BEGIN_OMISSIONS = "<!-- written by `python -m evidence.translation --omissions --report` -->"
END_OMISSIONS = "<!-- end of what is written on omissions -->"

#: Own reward above the start by so many paired standard errors counts as learned.
LEARNED = 5.0
_COLOURS = {"metricx": "C0", "spans": "C1", "both": "C2", "shuffled": "C7"}

Run = dict[str, Any]


def show(results: dict[str, Any]) -> None:
    """Print the tables on the terminal: all of them, while the page has a few.

    The last lines say what the seeds show.
    """
    if _on_omissions(results):
        text = omission_tables(results)
    else:
        runs = main_runs(results)
        parts = [all_tables(results), "### Tokens that the start policy was penalised for"]
        text = "\n\n".join([*parts, probe_table(runs), *verdicts(runs)])
    Console(width=160).print(Markdown(text))


def write_page(results: dict[str, Any]) -> None:
    """Put tables and pictures into docs/explanation/evidence/translation.md."""
    if _on_omissions(results):
        text = "\n\n".join([_headline(results), quality_table(results["runs"], results["start"])])
        write_between(BEGIN_OMISSIONS, END_OMISSIONS, text, PAGE)
        return
    names = write_images(results)
    image_links = "\n".join(f"![{title}]({name}.svg)" for name, title in names)
    write_between(BEGIN, END, f"{page_tables(results)}\n\n{image_links}", PAGE)


def _on_omissions(results: dict[str, Any]) -> bool:
    return any(run["arm"] in ON_OMISSIONS.keys() - ARMS.keys() for run in results["runs"])


# -- tables -------------------------------------------------------------------------------------


def page_tables(results: dict[str, Any]) -> str:
    """Return the tables of the page, in Markdown."""
    runs = main_runs(results)
    chrf = _changes(runs).get("chrF")
    seeds = [seeds_table(chrf, ARMS["shuffled"].title, digits=2)] if chrf else []
    title = "Change of chrF from the start, seeds as the unit:"
    parts = [_headline(results), quality_table(runs, results["start"])]
    return "\n\n".join([*parts, *([title] if seeds else []), *seeds])


def all_tables(results: dict[str, Any]) -> str:
    """Return all tables, in Markdown."""
    runs, start = main_runs(results), results["start"]
    compared = [run for run in runs if run["seed"] == 1 and run["arm"] in ("both", "spans")]
    ablations = [run for run in results["runs"] if ARMS[run["arm"]].ablation]
    parts = [
        _headline(results),
        "### Own reward",
        reward_table(runs),
        "### Quality on the held-out sources",
        quality_table(runs, start),
        *seed_tables(runs),
        "### Where chrF changes: sources by what was wrong at the start",
        fault_table(runs),
        "### Ablations (seed 1)",
        ablation_table([*compared, *ablations]),
    ]
    return "\n\n".join(parts)


def main_runs(results: dict[str, Any]) -> list[Run]:
    """Return the runs of the arms with several seeds."""
    return [run for run in results["runs"] if not ARMS[run["arm"]].ablation]


def omission_tables(results: dict[str, Any]) -> str:
    """Return the tables of spans with omissions."""
    runs, start = results["runs"], results["start"]
    parts = [
        _headline(results),
        "Own reward:",
        reward_table(runs),
        "Quality on the held-out sources:",
        quality_table(runs, start),
        "What is left out, the mean of a translation:",
        omission_table(runs, start),
    ]
    return "\n\n".join(parts)


def _headline(results: dict[str, Any]) -> str:
    return wrapped(
        f"Held out: {results['sources']} sources of `demo/data/{results['held_out']}`. "
        f"{results['updates']} updates a run. Commit `{results['machine']['commit']}`. "
        "Two numbers in a cell are the lowest and the highest of the seeds."
    )


def omission_table(runs: Sequence[Run], start: dict[str, Any]) -> str:
    """Return how much is left out, and how many texts are cut at the limit of tokens."""
    head = ["arm", "penalty of omissions", "cut at the limit of tokens"]
    rows = [["start", cell(start["omission"], 2), spread_shares([start["cut"]])]]
    for title, arm_runs in _by_arm(runs).items():
        ends = [run["curve"][-1] for run in arm_runs]
        left_out = spread([end["omission"] for end in ends], 2)
        rows.append([title, left_out, spread_shares([end["cut"] for end in ends])])
    return markdown_table(head, rows)


def seed_tables(runs: Sequence[Run]) -> list[str]:
    """Return the tables with seeds as the unit; an empty list without the control."""
    parts = []
    for label, arms in _changes(runs).items():
        parts += [f"### {label}: change from the start, seeds as the unit"]
        parts += [seeds_table(arms, ARMS["shuffled"].title, digits=2)]
    return parts


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each stat with seeds as the unit; an empty list without the control."""
    control = ARMS["shuffled"].title
    return [seeds_verdict(label, arms, control) for label, arms in _changes(runs).items()]


def _changes(runs: Sequence[Run]) -> dict[str, dict[str, Changes]]:
    """Return name of a stat -> title of an arm -> its changes; empty without the control.

    Two arms' own rewards have no common scale. chrF and the MetricX reward (5 - score) have one.
    """
    by_arm = _by_arm(runs)
    if ARMS["shuffled"].title not in by_arm:
        return {}
    stats = (("chrF", "chrf", 1.0), ("MetricX reward", "metricx_score", -1.0))
    return {
        label: {
            title: {run["seed"]: sign * run["changes"][key]["change"] for run in arm_runs}
            for title, arm_runs in by_arm.items()
        }
        for label, key, sign in stats
    }


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return title of an arm -> its runs, in the order of the arms."""
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run["title"], []).append(run)
    return by_arm


def reward_table(runs: Sequence[Run]) -> str:
    """Return whether each arm gets more of its own reward."""
    head = ["arm", "own reward, start", "end", "change"]
    head += ["change in standard errors", f"{LEARNED:g} or more in each seed"]
    rows = []
    for title, arm_runs in _by_arm(runs).items():
        rewards = [run["own_reward"] for run in arm_runs]
        errors = [reward["errors"] for reward in rewards]
        rows.append(
            [
                title,
                spread([reward["before"] for reward in rewards], 3),
                spread([reward["after"] for reward in rewards], 3),
                spread([reward["change"] for reward in rewards], 3, signs=True),
                spread(errors, 1, signs=True),
                "yes" if min(errors) >= LEARNED else "no",
            ]
        )
    return markdown_table(head, rows)


def quality_table(runs: Sequence[Run], start: dict[str, Any]) -> str:
    """Return the other quality stats at the end; the first row is the start policy."""
    digits = {
        "chrF": ("chrf", 2),
        "BLEU": ("bleu", 2),
        "MetricX": ("metricx_score", 2),
        "xCOMET": ("xcomet_score", 3),
        "penalty a token": ("penalty", 2),
        "critical spans": ("spans_CRITICAL", 2),
        "tokens": ("tokens", 1),
    }
    shares = {"Korean letters": "korean", "empty": "empty"}

    def cells(points: Sequence[dict[str, Any]]) -> list[str]:
        values = [spread([point[key] for point in points], d) for key, d in digits.values()]
        return values + [spread_shares([point[key] for point in points]) for key in shares.values()]

    rows = [["start", *cells([start]), ""]]
    for title, arm_runs in _by_arm(runs).items():
        ends = [run["curve"][-1] for run in arm_runs]
        rows.append([title, *cells(ends), spread([run["kl"] for run in arm_runs], 2)])
    return markdown_table(["arm", *digits, *shares, "KL"], rows)


def ablation_table(runs: Sequence[Run]) -> str:
    """Return what each run of one seed ends with, and its changes."""
    head = ["arm", "own reward: change in standard errors", "chrF", "change [95 %]"]
    head += ["MetricX", "critical spans", "tokens", "empty", "KL"]
    rows = []
    for run in runs:
        end = run["curve"][-1]
        rows.append(
            [
                run["title"],
                f"{run['own_reward']['errors']:+.1f}",
                cell(end["chrf"], 2),
                _with_interval(run["changes"]["chrf"]),
                cell(end["metricx_score"], 2),
                cell(end["spans_CRITICAL"], 2),
                cell(end["tokens"], 1),
                spread_shares([end["empty"]]),
                cell(run["kl"], 2),
            ]
        )
    return markdown_table(head, rows)


def probe_table(runs: Sequence[Run]) -> str:
    """Return how likely the start policy's own tokens still are."""
    columns = {
        "log-probability of penalised tokens": ("hit_logp", 2),
        "of the others": ("free_logp", 2),
    }
    rows = []
    for title, arm_runs in _by_arm(runs).items():
        probes = [run["probe"] for run in arm_runs]
        gaps = [probe["gap_logp"]["after"] - probe["gap_logp"]["before"] for probe in probes]
        cells = [
            _from_to(probes[0][key]["before"], [probe[key]["after"] for probe in probes], digits)
            for key, digits in columns.values()
        ]
        rows.append([title, *cells, spread(gaps, 2, signs=True)])
    return markdown_table(["arm", *columns, "penalised against others, change"], rows)


def fault_table(runs: Sequence[Run]) -> str:
    """Return the sources in three groups, by the errors of the start policy."""
    names = list(runs[0]["groups"]) if runs else []
    head = ["arm"]
    for name in names:
        count = runs[0]["groups"][name]["sources"]
        head += [f"{name} ({count}): chrF", "length"]
    rows = []
    for title, arm_runs in _by_arm(runs).items():
        cells = []
        for name in names:
            groups = [run["groups"][name] for run in arm_runs]
            for key, digits in (("chrf", 1), ("length", 2)):
                ends = [group[key][1] for group in groups]
                cells.append(_from_to(groups[0][key][0], ends, digits))
        rows.append([title, *cells])
    return markdown_table(head, rows)


def _from_to(start: float, ends: Sequence[float], digits: int) -> str:
    return f"{cell(start, digits)} → {spread(ends, digits)}"


def _with_interval(change: dict[str, Any]) -> str:
    low, high = change["interval"]
    return f"{change['after'] - change['before']:+.2f} [{low:+.2f}, {high:+.2f}]"


# -- pictures -----------------------------------------------------------------------------------


def write_images(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Write the charts, and return (file name without suffix, title) of each."""
    runs = [run for run in results["runs"] if run["arm"] in _COLOURS]
    curves: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
        ("chrf", "held-out chrF", lambda point: point["chrf"]),
    )
    PAGES.mkdir(parents=True, exist_ok=True)
    names = []
    for name, title, value in curves:
        svg = chart_image(title, "update", partial(_curves, runs, value))
        if svg is not None:
            (PAGES / f"{name}.svg").write_text(svg, encoding="utf-8")
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
