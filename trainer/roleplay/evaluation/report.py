"""The pages: report.html of a run, evaluation.html of a policy, comparison.html of two.

A page is one file, without scripts and external resources; every text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.page import STYLE
from scorekit.report.render import visible
from trainer.roleplay.evaluation.diagnostics import STRETCH
from trainer.roleplay.evaluation.stats import curves, table
from trainer.runs.cli.curves import draw_curves
from trainer.runs.cli.paired import FEWEST, RESAMPLES, PairedStat, as_row
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import compare

Line = Mapping[str, Any]
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
    updates, evals = read_jsonl(folder / "log.jsonl"), read_jsonl(folder / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{folder}: not a run (no log.jsonl, no eval.jsonl)")
    pairs: list[tuple[str, list[tuple[Line, Line]]]] = []
    if len(evals) > 1:
        before, after = (read_jsonl(folder / evals[index]["completions"]) for index in (0, -1))
        if [line["id"] for line in before] != [line["id"] for line in after]:
            raise UserError(f"{folder}: its first and last evaluation are of other turns")
        pairs = changed_most(before, after)
    return _write(
        folder / "report.html",
        "report",
        title=title,
        notes=notes,
        rows=compare(table(), evals[0], evals[-1]) if evals else [],
        last=evals[-1] if evals else {},
        curves=[Markup(svg) for svg in draw_curves(curves(), updates, {DEFAULT_EVAL_SET: evals})],
        examples=pairs,
        config=_read_text(folder / "config.yaml"),
        updates=len(updates),
    )


def write_evaluation(
    path: Path, policy: str, stats: Mapping[str, Any], lines: Sequence[Line], config: str = ""
) -> Path:
    """Write a page of the stats of an evaluation, its worst replies and its first ones."""
    worst = sorted(lines, key=lambda line: line["reward"])[:_MAX_EXAMPLES]
    return _write(
        path,
        "evaluation",
        policy=policy,
        figures=stats,
        rows=compare(table(), stats, {}),
        examples=[("Worst by the reward", worst), ("The first of the set", lines[:_MAX_EXAMPLES])],
        config=config,
    )


def write_comparison(
    path: Path,
    names: tuple[str, str],
    stats: Sequence[PairedStat],
    first: Sequence[Line],
    second: Sequence[Line],
) -> Path:
    """Write a page of the intervals of the differences, and of the largest changes."""
    return _write(
        path,
        "comparison",
        first=names[0],
        second=names[1],
        rows=[as_row(stat) for stat in stats],
        resamples=RESAMPLES,
        fewest=FEWEST,
        examples=changed_most(first, second),
    )


def changed_most(
    first: Sequence[Line], second: Sequence[Line]
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    """Return (title, pairs of lines): largest gains and losses of reward, and the first of the
    set."""
    line_pairs = list(zip(first, second, strict=True))
    order = sorted(line_pairs, key=lambda pair: pair[1]["reward"] - pair[0]["reward"])
    improved = [(a, b) for a, b in reversed(order) if b["reward"] > a["reward"]][:_MAX_EXAMPLES]
    worsened = [(a, b) for a, b in order if b["reward"] < a["reward"]][:_MAX_EXAMPLES]
    kinds = (
        ("Improved most by the reward", improved),
        ("Worsened most by the reward", worsened),
        ("The first of the set", line_pairs[:_MAX_EXAMPLES]),
    )
    return [(title, pairs) for title, pairs in kinds if pairs]


def _write(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder."""
    environment = Environment(
        loader=PackageLoader("trainer.roleplay.evaluation", "."),
        autoescape=select_autoescape(["html"]),
    )
    environment.filters |= {
        "visible": visible,
        "parts": _parts,
        "scores": _scores,
        "reasons": _reasons,
        "told": _speakers,
    }
    page = environment.get_template(f"{template}.html").render(
        style=Markup(STYLE), stretch=STRETCH, **values
    )
    write_atomic(path, page)
    return path


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


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
