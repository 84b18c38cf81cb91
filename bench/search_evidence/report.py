"""The tables and the picture of docs/evidence.md on search, from the results alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.kit.evidence import (
    PICTURES,
    Changes,
    cell,
    markdown_table,
    seeds_table,
    seeds_verdict,
    write_between,
)
from bench.search_evidence.arms import CONTROL
from bench.search_evidence.sets import SETS
from scorekit.report.page import chart_image

PICTURE = PICTURES / "search.svg"
BEGIN = "<!-- written by `python -m bench.search_evidence --report` -->"
END = "<!-- end of what is written on search -->"
TITLE = "NDCG in training, mean of the seeds"
#: Arms of the picture.
_COLOURS = {
    "both": "C2",
    "ndcg": "C0",
    "judge": "C1",
    "ppo": "C4",
    "shuffled": "C7",
    "rows": "C3",
    "random": "C5",
}
#: Column of the tables -> figure and digits.
COLUMNS = {
    "reward": ("reward_mean", 3),
    "NDCG": ("ndcg_mean", 3),
    "judge": ("judge_mean", 3),
    "success": ("success_share", 3),
    "without evidence": ("success_without_evidence_share", 3),
    "gold seen": ("gold_seen_share", 3),
    "turns": ("turns_mean", 2),
    "searches": ("searches_mean", 2),
    "crops": ("crops_mean", 2),
    "invalid": ("invalid_mean", 2),
    "forced": ("forced_share", 3),
}
#: Figures of the tables by seeds.
SEED_FIGURES = {"reward": "reward_mean", "NDCG": "ndcg_mean"}
#: Those whose changes are told with an interval.
CHANGED = ("reward", "NDCG", "judge", "without evidence", "invalid", "forced")
STARTS = {
    "start-warm-nothing": "the start",
    "start-random-nothing": "random weights",
    "start-warm-half": "the start, the generator knows half",
}

Results = Mapping[str, Any]


def show(results: Results) -> None:
    """The tables on the terminal; the last lines say what they show of each set."""
    Console(width=160).print(Markdown(tables(results)))


def write_page(results: Results) -> None:
    """Put tables and picture into docs/evidence.md."""
    body = tables(results)
    drawn = picture_of(results)
    if drawn is not None:
        PICTURE.write_text(drawn, encoding="utf-8")
        body += f"\n\n![{TITLE}](evidence/{PICTURE.name})"
    write_between(BEGIN, END, body)


def picture_of(results: Results) -> str | None:
    """The curves of training, as SVG."""
    return chart_image(TITLE, "update", partial(_curves, results["arms"]))


def tables(results: Results) -> str:
    """All tables, in Markdown: those of the final test first, and of each set but it the main ones
    alone."""
    parts = [f"{results['updates']} updates a run; commit `{results['machine']['commit']}`."]
    for number, (name, of) in enumerate(results["sets"].items()):
        title = SETS[name].title
        parts += [
            f"### What each policy does on {title}",
            f"{of['questions']} questions about {len(of['documents'])} documents, "
            f"{of['episodes']} episodes a policy.",
            ends_table(results, of),
            f"### Changes on {title}, seeds as the unit",
            *(
                part
                for name, key in SEED_FIGURES.items()
                if (arms := changes_of(results, of, key))
                for part in (f"{name}:", seeds_table(arms, _title(results, CONTROL)))
            ),
            f"### Changes from the start on {title}, questions as the unit [95 %]",
            "These intervals hold the trained policies fixed and draw the questions anew. They say "
            "nothing about another seed.",
            changes_table(results, of, "changes"),
            f"### Against both rewards, at the end, on {title}, questions as the unit [95 %]",
            changes_table(results, of, "against_both"),
        ]
        if not number:
            parts += [
                f"### Why turns were invalid on {title}",
                invalid_table(results, of),
            ]
    parts += ["### What training had nothing to learn from", flat_table(results)]
    return "\n\n".join([*parts, "### What the seeds show", *verdicts(results)])


def verdicts(results: Results) -> list[str]:
    """A sentence on each set and figure, from the tables of seeds."""
    return [
        seeds_verdict(f"{name} on {SETS[of].title}", arms, _title(results, CONTROL))
        for of, found in results["sets"].items()
        for name, key in SEED_FIGURES.items()
        if (arms := changes_of(results, found, key))
    ]


def changes_of(results: Results, of: Results, key: str) -> dict[str, Changes]:
    """Title of an arm -> its change of a figure by seed; empty where the control is missing."""
    if CONTROL not in of["arms"]:
        return {}
    return {
        _title(results, name): {
            seed: changes[key]
            for seed, changes in zip(arm["seeds"], arm["of_seeds"], strict=True)
            if changes[key] is not None
        }
        for name, arm in of["arms"].items()
    }


def ends_table(results: Results, of: Results) -> str:
    """Before and after on a set, by one yardstick; all seeds together."""
    rows = [
        [STARTS[name], "", *_cells(found)] for name, found in of["starts"].items() if name in STARTS
    ]
    for name, arm in of["arms"].items():
        rows.append([_title(results, name), str(len(arm["seeds"])), *_cells(arm["end"])])
    return markdown_table(["", "seeds", *COLUMNS], rows)


def changes_table(results: Results, of: Results, kind: str) -> str:
    """kind: `changes`, each arm against its start; `against_both`, against that arm's end."""
    rows = [
        [_title(results, name), *(_with_interval(arm[kind][COLUMNS[key][0]]) for key in CHANGED)]
        for name, arm in of["arms"].items()
        if kind in arm
    ]
    return markdown_table(["", *CHANGED], rows)


def flat_table(results: Results) -> str:
    """Of the groups of an update those whose episodes have all the same reward."""
    rows = []
    for arm in results["arms"].values():
        means = [fmean(run) for run in arm["logged"]["groups_without_spread"] if run]
        rows.append([arm["title"], cell(fmean(means) if means else None, 1)])
    return markdown_table(["", "groups without spread, an update"], rows)


def invalid_table(results: Results, of: Results) -> str:
    """Invalid turns of a hundred episodes, by reason."""
    count = of["episodes"]
    rows_of = {STARTS[name]: (found, count) for name, found in of["starts"].items()}
    rows_of |= {
        _title(results, name): (arm["end"], count * len(arm["seeds"]))
        for name, arm in of["arms"].items()
    }
    reasons = sorted({reason for found, _ in rows_of.values() for reason in found["invalid"]})
    rows = [
        [title, *(cell(100 * found["invalid"].get(reason, 0) / count, 1) for reason in reasons)]
        for title, (found, count) in rows_of.items()
    ]
    return markdown_table(["of 100 episodes", *(f"`{reason}`" for reason in reasons)], rows)


def _title(results: Results, name: str) -> str:
    return str(results["arms"][name]["title"])


def _cells(found: Mapping[str, Any]) -> list[str]:
    return [cell(found[key], digits) for key, digits in COLUMNS.values()]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _with_interval(found: Mapping[str, Any]) -> str:
    if found["interval"] is None:
        return _signed(found["change"])
    low, high = found["interval"]
    return f"{found['change']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _curves(arms: Mapping[str, Any], axes: Any) -> int:
    """A line an arm; to the right of them there is room for their names."""
    shown = [name for name in arms if name in _COLOURS]
    updates = 0
    for name in shown:
        runs = [run for run in arms[name]["logged"]["ndcg_mean"] if None not in run]
        means = [sum(of) / len(of) for of in zip(*runs, strict=False)]
        axes.plot(range(1, len(means) + 1), means, color=_COLOURS[name], label=arms[name]["title"])
        updates = max(updates, len(means))
    axes.set_xlim(0, 2 * updates + 1)
    axes.set_xticks(range(0, updates + 1, max(1, updates // 4)))
    return len(shown)
