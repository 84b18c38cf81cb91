"""report.html: the figures with their pictures, and translations where metric and people differ.

One file, with no script and nothing fetched from elsewhere; every text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.files import write_atomic
from scorekit.metaeval import agreement, spans
from scorekit.metaeval.evaluate import MetaEvaluation, MetricFigures
from scorekit.metaeval.judgements import JudgedTranslation, Span
from scorekit.metaeval.metrics import MetricScores
from scorekit.metaeval.table import cell, head, notes
from scorekit.report.page import STYLE, picture
from scorekit.report.render import as_html, visible
from scorekit.schemas import ErrorSpan

#: Translations of each kind that are shown of a metric.
_EXAMPLES = 4
#: Characters of a name in a picture: more run out of it.
_NAME = 18


def write_page(
    path: Path,
    result: MetaEvaluation,
    translations: Sequence[JudgedTranslation],
    scores: Sequence[MetricScores],
    title: str,
) -> None:
    """Write the page."""
    env = Environment(
        loader=PackageLoader("scorekit.metaeval", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    env.filters["visible"] = visible
    with_spans = [one for one in result.metrics if one.span_rows]
    text = env.get_template("page.html").render(
        style=Markup(STYLE),
        title=title,
        head=head(result),
        notes=notes(result),
        metrics=result.metrics,
        agreement=agreement.FIGURES,
        spans=spans.FIGURES,
        with_spans=with_spans,
        cell=cell,
        pictures=[Markup(drawn) for drawn in _pictures(result, with_spans)],
        groups={by: _grouped(with_spans, by) for by in ("severity", "length", "translation")},
        examples=[(one.name, _examples(translations, one)) for one in scores if one.has_spans],
    )
    write_atomic(path, text)


def _pictures(result: MetaEvaluation, with_spans: Sequence[MetricFigures]) -> list[str]:
    drawn = [
        picture(title, "with 95 % over segments", partial(_bars, result.metrics, name))
        for name, title in agreement.FIGURES.items()
    ]
    drawn += [
        picture(spans.FIGURES[name], "with 95 % over segments", partial(_bars, with_spans, name))
        for name in ("chars_f1", "mpp_f1")
    ]
    drawn += [
        picture(
            f"{visible(one.name)} by system", "people's mean score", partial(_systems, result, one)
        )
        for one in result.metrics
        if one.system_scores and not (one.is_baseline and one.values["system_pearson"] is None)
    ]
    return [one for one in drawn if one is not None]


def _bars(metrics: Sequence[MetricFigures], name: str, axes: Any) -> int:
    """A figure of each metric; grey: baselines."""
    known = [one for one in reversed(metrics) if one.values.get(name) is not None]
    for place, one in enumerate(known):
        value = one.values[name]
        assert value is not None
        low, high = one.intervals[name]["segments"] or (value, value)
        axes.barh(place, value, color="#b8b8c0" if one.is_baseline else "#4a76b8", height=0.6)
        axes.plot((low, high), (place, place), color="#1c1c1e", linewidth=1.2)
    axes.set_yticks(range(len(known)), [_short(one.name) for one in known])
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(0, color="#1c1c1e", linewidth=0.8)
    return 1 if known else 0


def _systems(result: MetaEvaluation, one: MetricFigures, axes: Any) -> int:
    """A point a system."""
    for system, human in result.human.items():
        axes.plot(human, one.system_scores[system], "o", color="#4a76b8", markersize=4)
        axes.annotate(
            _short(system), (human, one.system_scores[system]), fontsize=5.5, xytext=(3, 2),
            textcoords="offset points",
        )  # fmt: skip
    axes.margins(0.14)
    axes.set_ylabel("its mean score")
    return 1


def _short(name: str) -> str:
    name = visible(name)
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _grouped(metrics: Sequence[MetricFigures], by: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """(name of the group, (metric, its figures))"""
    names = list(dict.fromkeys(g["name"] for one in metrics for g in one.groups if g["by"] == by))
    if by != "severity":
        names.sort(key=lambda name: int(name.rstrip("+").split("-")[0]))
    return [
        (
            name,
            [(m.name, g) for m in metrics for g in m.groups if (g["by"], g["name"]) == (by, name)],
        )
        for name in names
    ]


def _examples(
    translations: Sequence[JudgedTranslation], metric: MetricScores
) -> list[dict[str, Any]]:
    """Where people mark most and the metric nothing of it, and the other way round."""
    missed: list[tuple[int, int, dict[str, Any]]] = []
    invented: list[tuple[int, int, dict[str, Any]]] = []
    for one, found, score in zip(translations, metric.spans, metric.scores, strict=True):
        rating = next((r for r in one.ratings if r.spans is not None), None)
        if found is None or rating is None or rating.spans is None:
            continue
        gold, own = _characters(rating.spans), _characters(found)
        entry = {"of": one, "score": score, "people": rating.spans, "metric": found}
        missed.append((len(gold - own) if not gold & own else 0, len(missed), entry))
        invented.append((len(own - gold) if not gold else 0, len(invented), entry))
    lines = []
    for kind, ranked in (("people mark", missed), ("only the metric marks", invented)):
        best = sorted(ranked, key=lambda item: (-item[0], item[1]))[:_EXAMPLES]
        lines += [_shown(kind, entry) for size, _, entry in best if size]
    return lines


def _shown(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    one = entry["of"]
    return {
        "kind": kind,
        "src": one.src,
        "system": one.system,
        "human": one.score,
        "score": entry["score"],
        "people": Markup(as_html(one.mt, _wire(entry["people"]))),
        "metric": Markup(as_html(one.mt, _wire(entry["metric"]))),
    }


def _characters(marked: Sequence[Span]) -> set[int]:
    return {place for span in marked for place in range(span.start, span.end)}


def _wire(marked: Sequence[Span]) -> list[ErrorSpan]:
    return [ErrorSpan(start=s.start, end=s.end, severity=s.severity[:40] or "?") for s in marked]
