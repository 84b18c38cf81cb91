"""Writes the tables and charts on staleness from bench/results/staleness.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from evidence.seeds import PAGES, Changes, SeedInterval, against, cell, seed_interval, wrapped
from evidence.staleness.arms import ARMS, CONTROLS, FRESH
from scorekit.report.page import chart_image

PAGE = PAGES / "staleness.md"
BEGIN = "<!-- written by `python -m evidence.staleness --report` -->"
END = "<!-- end of what is written on staleness -->"

#: Arms of the charts. A control has the color of its arm and a dotted line.
_COLORS = {FRESH: "C0", "stale-1": "C1", "stale-4": "C3"}

Run = dict[str, Any]
#: Arm -> its runs by seed.
Runs = dict[str, dict[int, Run]]


class Metric(NamedTuple):
    """Describes a held-out stat.

    sign: -1 where less is better.
    """

    title: str
    key: str
    digits: int = 2
    sign: int = 1

    def value(self, point: Run) -> float:
        """Return the stat, more is better; MetricX as its reward, 5 - score."""
        value = float(point[self.key])
        return value if self.sign > 0 else 5.0 - value

    def changes(self, runs: dict[int, Run]) -> Changes:
        """Return the change of each run from its start to its end."""
        return {
            seed: self.value(run["curve"][-1]) - self.value(run["curve"][0])
            for seed, run in runs.items()
        }


CHRF = Metric("chrF", "chrf")
METRICX = Metric("MetricX reward (5 - score)", "metricx_score", sign=-1)
#: Stats whose changes have a table on the page, and all of them.
ON_PAGE = (CHRF, METRICX)
METRICS = (*ON_PAGE, Metric("xCOMET", "xcomet_score", digits=3))


def show(results: dict[str, Any]) -> None:
    """Print the tables on the terminal, and more than the page has.

    The last lines say what they say.
    """
    runs = runs_by_arm(results)
    parts = [tables(results)]
    for metric in METRICS[len(ON_PAGE) :]:
        parts += [_changes_heading(metric), changes_table(runs, metric)]
    parts += [verdict(runs, metric) for metric in METRICS]
    Console(width=160).print(Markdown("\n\n".join(parts)))


def write_page(results: dict[str, Any]) -> None:
    """Put tables and charts into docs/explanation/evidence/staleness.md."""
    images = write_images(results)
    links = "\n".join(f"![{title}]({name}.svg)" for name, title in images)
    body = f"{tables(results)}\n\n{links}" if links else tables(results)
    write_between(BEGIN, END, body, PAGE)


def runs_by_arm(results: dict[str, Any]) -> Runs:
    """Return the runs of each arm that has any, in the order of the arms."""
    runs: Runs = {}
    for name in ARMS:
        by_seed = {run["seed"]: run for run in results["runs"] if run["arm"] == name}
        if by_seed:
            runs[name] = by_seed
    return runs


# -- tables -------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the page in Markdown."""
    runs = runs_by_arm(results)
    parts = [
        wrapped(
            f"Held out: {results['sources']} sources of `demo/data/{results['held_out']}`. "
            f"{results['updates']} updates a run. Commit `{results['machine']['commit']}`."
        ),
        "### Ends, mean of the seeds",
        ends_table(runs, results["start"]),
    ]
    for metric in ON_PAGE:
        parts += [_changes_heading(metric), changes_table(runs, metric)]
    parts += ["### Ages and importance weights, mean of the updates", weights_table(runs)]
    return "\n\n".join(parts)


def _changes_heading(metric: Metric) -> str:
    return f"### {metric.title}: change from the start, seeds as the unit"


def ends_table(runs: Runs, start: dict[str, Any]) -> str:
    """Return the held-out stats of the start and of each arm's ends, and chrF on the way."""
    updates = sorted(
        {p["update"] for arm in runs.values() for run in arm.values() for p in run["curve"][1:]}
    )
    head = ["arm", "seeds", *(f"chrF after {update}" for update in updates)]
    head += ["chrF at the end, seed by seed", "BLEU", "MetricX", "xCOMET", "tokens", "KL"]
    stats = {"bleu": 2, "metricx_score": 2, "xcomet_score": 3, "tokens": 1}
    first = [cell(start[key], digits) for key, digits in stats.items()]
    rows = [["start", "", *[""] * len(updates), cell(start["chrf"], 2), *first, ""]]
    for name, by_seed in runs.items():
        arm_runs = [by_seed[seed] for seed in sorted(by_seed)]
        ends = [run["curve"][-1] for run in arm_runs]
        rows.append(
            [
                ARMS[name].title,
                str(len(arm_runs)),
                *(cell(_mean_at(arm_runs, update), 2) for update in updates),
                ", ".join(f"{end['chrf']:.2f}" for end in ends),
                *(cell(fmean(end[key] for end in ends), digits) for key, digits in stats.items()),
                cell(_mean([run["kl"] for run in arm_runs]), 2),
            ]
        )
    return markdown_table(head, rows)


def changes_table(runs: Runs, metric: Metric) -> str:
    """Return how an arm changes a stat, and how much more than its control and than FRESH."""
    rows = []
    for name in [name for name in runs if name in CONTROLS]:
        by_seed = runs[name]
        changes = metric.changes(by_seed)
        digits = metric.digits
        rows.append(
            [
                ARMS[name].title,
                ", ".join(f"{changes[seed]:+.{digits}f}" for seed in sorted(changes)),
                seed_interval(list(changes.values())).as_text(digits),
                _text(_less(runs, metric, name, CONTROLS.get(name)), digits),
                _text(_less(runs, metric, name, FRESH), digits),
            ]
        )
    control, fresh = "less its control, paired by seed [95 %]", f"less *{ARMS[FRESH].title}* [95 %]"
    return markdown_table(["arm", "seed by seed", "mean of the seeds [95 %]", control, fresh], rows)


def weights_table(runs: Runs) -> str:
    """Return the ages of the samples, and what the importance correction did."""
    head = ["arm", "age: mean, largest", "gap", "weight", "capped (worst update)"]
    head += ["masked (worst update)", "clipped by PPO", "too old, left out"]
    rows = []
    for name in [name for name in runs if name in CONTROLS]:
        by_seed = runs[name]
        stats = [run["staleness"] for run in by_seed.values()]
        mean = {key: _mean([s[key] for s in stats]) for key in stats[0] if key != "updates_by_age"}
        worst = {key: max(s[key] for s in stats) for key in ("capped_max", "masked_max")}
        rows.append(
            [
                ARMS[name].title,
                f"{cell(mean['staleness_mean'], 2)}, {max(s['staleness_max'] for s in stats)}",
                cell(mean["sampler_gap_mean"], 3),
                cell(mean["importance_weight_mean"], 3),
                _shares(mean["importance_capped_frac"], worst["capped_max"]),
                _shares(mean["importance_masked_frac"], worst["masked_max"]),
                _share(mean["clip_frac"]),
                str(sum(s["dropped_stale"] for s in stats)),
            ]
        )
    return markdown_table(head, rows)


def verdict(runs: Runs, metric: Metric) -> str:
    """Return the sentences that say which arms beat their control, and which differ from FRESH."""
    digits, sentences = metric.digits, []
    names = [name for name in CONTROLS if name in runs]
    beats = [name for name in names if _is_above(_less(runs, metric, name, CONTROLS[name]))]
    sentences.append(f"Above its control, clear of 0 over the seeds: {_titles(beats) or 'none'}.")
    for name in names:
        less = _less(runs, metric, name, FRESH)
        if less is None or less.low is None:
            continue
        size = "clear of 0" if less.is_clear else "within the seeds' spread"
        sentences.append(
            f"*{ARMS[name].title}* less *{ARMS[FRESH].title}*: {less.as_text(digits)}, {size}."
        )
    return f"**{metric.title}.** {' '.join(sentences)}"


def _less(runs: Runs, metric: Metric, name: str, other: str | None) -> SeedInterval | None:
    """Return how much more an arm changes than another, paired by seed; None without pairs."""
    if other is None or other == name or other not in runs or name not in runs:
        return None
    return against(metric.changes(runs[name]), metric.changes(runs[other]))


def _is_above(interval: SeedInterval | None) -> bool:
    return interval is not None and interval.is_clear and interval.mean > 0


def _titles(names: Sequence[str]) -> str:
    return "; ".join(f"*{ARMS[name].title}*" for name in names)


def _text(interval: SeedInterval | None, digits: int) -> str:
    if interval is None:
        return ""
    clear = "" if interval.low is None else ": clear of 0" if interval.is_clear else ": holds 0"
    return interval.as_text(digits) + clear


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _mean_at(runs: Sequence[Run], update: int) -> float | None:
    """Return the mean chrF after an update; None if a run was not measured then."""
    points = [p for run in runs for p in run["curve"] if p["update"] == update]
    return fmean(p["chrf"] for p in points) if len(points) == len(runs) else None


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _shares(mean: float | None, worst: float) -> str:
    return f"{_share(mean)} ({_share(worst)})"


# -- charts -------------------------------------------------------------------------------------


def write_images(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Write the charts, and return (file name without suffix, title) of each."""
    runs = runs_by_arm(results)
    PAGES.mkdir(parents=True, exist_ok=True)
    names = []
    for name, metric in (("staleness", CHRF), ("staleness_metricx", METRICX)):
        title = f"held-out {metric.title}"
        svg = chart_image(title, "update", partial(_curves, runs, metric))
        if svg is not None:
            (PAGES / f"{name}.svg").write_text(svg, encoding="utf-8")
            names.append((name, title))
    return names


def _curves(runs: Runs, metric: Metric, axes: Any) -> int:
    """Draw each arm's mean of the seeds, and each seed as a thin line; return how many arms.

    The names have the space to the right of the curves.
    """
    num_arms = 0
    for name, color in _COLORS.items():
        for arm, style, marker in ((name, "-", "."), (CONTROLS[name], ":", "x")):
            if arm not in runs:
                continue
            curves = [
                {p["update"]: metric.value(p) for p in run["curve"]} for run in runs[arm].values()
            ]
            updates = sorted(set.intersection(*(set(curve) for curve in curves)))
            means = [fmean(curve[update] for curve in curves) for update in updates]
            for curve in curves:
                axes.plot(
                    *zip(*sorted(curve.items()), strict=True),
                    style,
                    color=color,
                    alpha=0.25,
                    linewidth=0.7,
                )
            axes.plot(
                updates,
                means,
                style,
                color=color,
                label=ARMS[arm].title,
                linewidth=1.5,
                marker=marker,
                markersize=4,
            )
            num_arms += 1
            axes.set_xlim(-1, 1.8 * updates[-1] + 1)
            axes.set_xticks(updates)
    return num_arms
