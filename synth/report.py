"""report.html of a run: what became of the sources, how scores and lengths are spread, pairs.

The page is one file, with no script and nothing fetched from elsewhere; every text is escaped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.page import STYLE, picture
from scorekit.render import visible
from synth.stats import STAGES, StageCounts, funnel
from synth.store import Record, StageFolder, digest_of, read_json, write_atomic

#: Pictures: title, stage and name of the distributions drawn over each other, label of the axis.
PICTURES: tuple[tuple[str, tuple[tuple[str, str, str], ...], str], ...] = (
    (
        "Source length of the pool",
        (("sample_sources", "source_tokens", "tokens, nearly"),),
        "tokens",
    ),
    (
        "Improvement of the sample over greedy",
        (("prefilter_score", "improvement", "all"), ("select_sources", "improvement", "selected")),
        "MetricX points (above 0: the sample is better)",
    ),
    (
        "Score of the greedy and the sampled translation",
        (("prefilter_score", "score_greedy", "greedy"),
         ("prefilter_score", "score_sample", "sample")),
        "MetricX score (lower is better)",
    ),
    (
        "Score of the candidates",
        (("score_select_best", "score_best", "best"),
         ("score_select_best", "score_worst", "worst")),
        "MetricX score (lower is better)",
    ),
    (
        "Length in characters",
        (("format_filter", "source_chars", "source"), ("format_filter", "target_chars", "target")),
        "characters",
    ),
    (
        "Length in tokens",
        (("format_filter", "source_tokens", "source"),
         ("format_filter", "target_tokens", "target")),
        "tokens, nearly",
    ),
)  # fmt: skip
BARS = 40  # of a picture
_SHOWN = 8  # pairs of each kind


def write_report(out_dir: str | Path, title: str = "Synthetic translations") -> Path:
    """Write report.html into a run's folder from stats.json and the stages' records.

    Raises UserError where no stage was begun there.
    """
    folder = Path(out_dir)
    counts = funnel(folder)
    if not counts:
        raise UserError(f"{folder}: no run here (no stage was begun)")
    stages = _read_stages(folder)
    environment = Environment(
        loader=PackageLoader("synth", "."), autoescape=select_autoescape(["html"])
    )
    environment.filters["visible"] = lambda text: "\n".join(map(visible, text.split("\n")))
    page = environment.get_template("report.html").render(
        title=title,
        style=Markup(STYLE),
        steps=_steps(counts, stages),
        rejections=_rejections(counts),
        pictures=[Markup(svg) for svg in _draw(stages)],
        calls=_calls(stages),
        judge=(stages.get("format_filter") or {}).get("distributions", {}).get("judge", {}),
        examples=_pick(StageFolder(folder, "format_filter")),
        rejected=_pick_rejected(StageFolder(folder, "format_filter")),
    )
    path = folder / "report.html"
    write_atomic(path, page.encode())
    return path


def _read_stages(folder: Path) -> dict[str, Any]:
    stages: dict[str, Any] = (read_json(folder / "stats.json", "stages") or {}).get("stages", {})
    return stages


def _steps(counts: list[StageCounts], stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the funnel; `share`: of the most records that a stage let through, for the bar."""
    most = max(1, *(c.records_out for c in counts))
    return [
        {
            "stage": c.stage,
            "shards": f"{c.done} of {c.shards}",
            "records_in": c.records_in,
            "records_out": c.records_out,
            "rejected": c.records_in - c.records_out,
            "share": round(100 * c.records_out / most, 2),
            "rate": stages.get(c.stage, {}).get("records_per_s"),
        }
        for c in counts
    ]


def _rejections(counts: Iterable[StageCounts]) -> list[dict[str, Any]]:
    return [
        {"stage": c.stage, "code": code, "count": count, "share": count / max(1, c.records_in)}
        for c in counts
        for code, count in sorted(c.rejected.items(), key=lambda item: (-item[1], item[0]))
    ]


def _calls(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was asked of teacher, MetricX and judge, a row for each stage that asked."""
    rows = []
    for name in STAGES:
        stage = stages.get(name, {})
        for service in ("teacher", "metricx", "judge"):
            told = stage.get(service) or {}
            if told.get("requests"):
                counts = {**told, **(stage.get("scorer") or {} if service == "metricx" else {})}
                shown = [f"{key.replace('_', ' ')} {_figure(key, n)}" for key, n in counts.items()]
                rows.append({"stage": name, "service": service, "counts": " · ".join(shown)})
    return rows


def _figure(key: str, value: float) -> str:
    if key.endswith("bytes"):
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.1f}" if "seconds" in key else f"{value:,.0f}"


def _draw(stages: Mapping[str, Any]) -> list[str]:
    """SVG pictures, one for each whose distributions are there."""
    pictures = []
    for title, series, label in PICTURES:
        found = [
            (stages.get(stage, {}).get("distributions", {}).get(name), of)
            for stage, name, of in series
        ]
        spreads = [(spread, of) for spread, of in found if spread]
        pictures.append(picture(title, label, partial(_draw_bars, spreads)))
    return [drawn for drawn in pictures if drawn is not None]


def _draw_bars(spreads: list[tuple[Mapping[str, Any], str]], axes: Any) -> int:
    """As shares of each set, in the same bars for all: sets of any size and width compare."""
    import numpy as np

    if not spreads:
        return 0

    low = min(spread["edges"][0] for spread, _ in spreads)
    high = max(spread["edges"][-1] for spread, _ in spreads)
    widest = max(float(np.diff(spread["edges"]).max()) for spread, _ in spreads)
    width = max((high - low) / BARS, widest)
    edges = low + width * np.arange(int((high - low) / width) + 2)
    for spread, label in spreads:
        middles = (np.array(spread["edges"][:-1]) + spread["edges"][1:]) / 2
        counts, _ = np.histogram(middles, bins=edges, weights=spread["counts"])
        axes.stairs(100 * counts / spread["n"], edges, fill=True, alpha=0.45, label=label)
    axes.set_ylabel("% of records")
    return len(spreads)


def _pick(folder: StageFolder) -> list[dict[str, Any]]:
    """Pairs that were kept: of the best score, of the worst, and drawn at random, always the same.

    One pass, a few records in memory.
    """
    kinds: tuple[tuple[str, Any], ...] = (
        ("Drawn at random", lambda record: digest_of(record["source_id"])),
        ("Best scores", lambda record: (record["best"]["score"], record["source_id"])),
        ("Worst scores that were kept", lambda r: (-r["best"]["score"], r["source_id"])),
    )
    tops: list[list[tuple[Any, Record]]] = [[] for _ in kinds]
    batch: list[Record] = []

    def merge() -> None:
        for top, (_, key) in zip(tops, kinds, strict=True):
            top[:] = heapq.nsmallest(
                _SHOWN, [*top, *((key(r), r) for r in batch)], key=lambda pair: pair[0]
            )
        batch.clear()

    for record in folder.records() if folder.done() else ():
        batch.append(record)
        if len(batch) == 1000:
            merge()
    merge()
    return [
        {"title": title, "records": [record for _, record in top]}
        for (title, _), top in zip(kinds, tops, strict=True)
        if top
    ]


def _pick_rejected(folder: StageFolder) -> list[Record]:
    """The first of each reason that the filter gave, two at most."""
    found: dict[str, list[Record]] = {}
    for record in folder.all_rejected() if folder.done() else ():
        few = found.setdefault(record["reason_code"], [])
        if len(few) < 2:
            few.append(record)
    return [record for code in sorted(found) for record in found[code]]
