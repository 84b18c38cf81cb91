"""Write report.html of a run: its funnel, distributions and example pairs.

The page is one file without scripts and external content; every text is escaped.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.languages import find_language
from scorekit.report.page import chart_image, write_html
from scorekit.report.render import visible
from synth.config import SynthConfig, languages
from synth.execution.stage import Stage
from synth.reasons import explain
from synth.sources.sampling import TYPES
from synth.stages.format_filter import FormatFilter
from synth.stages.sample_sources import SampleSources
from synth.stages.table import ORDER
from synth.storage.distributions import stratum
from synth.storage.stats import StageCounts, duration, funnel
from synth.storage.store import Record, StageFolder, read_json

BARS = 40  # of a chart
_LINES = 10  # of files, that could not be read
SHOWN = 8  # pairs of each kind that were kept
_PER_STRATUM, _RESCUED = 3, 6  # of a length bucket; of all
_REJECTED, _CODES = 2, 60  # of a reason; reasons: a judge may make up its own


def write_report(
    out_dir: str | Path, title: str | None = None, order: Sequence[Stage] = ORDER
) -> Path:
    """Write report.html into a run's folder from stats.json, the saved config and the records.

    Raises UserError if no stage was started there.
    """
    folder = Path(out_dir)
    counts = funnel((stage.name for stage in order), folder)
    if not counts:
        raise UserError(f"{folder}: no run here (no stage was started)")
    stages = (read_json(folder / "stats.json", "stages") or {}).get("stages", {})
    cfg = _config(folder)
    return write_html(
        folder / "report.html",
        "synth/report/report.html",
        {"visible": _visible_lines, "duration": duration},
        title=title or _title(cfg),
        tags=languages(cfg) if cfg else ("", ""),
        facts=_facts(cfg, folder) if cfg else [],
        settings=_settings(cfg) if cfg else "",
        steps=_steps(counts, stages),
        rejections=[
            row
            for c in counts  # of a stage, the most frequent first
            for row in _code_rows(c.stage, dict(Counter(c.rejected).most_common()), c.records_in)
        ],
        told=[row for c in counts for row in _code_rows(c.stage, c.told, c.records_out)],
        candidates=_explain(_spread(stages, "candidates_out")),
        unread=_unread(folder),
        strata=_strata(cfg, order, stages) if cfg else {},
        rescued=_spread(stages, "rescued"),
        pictures=_draw(order, stages),
        costs=_costs(order, stages),
        judge=_spread(stages, "judge"),
        examples=pick_examples(folder, order),
    )


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def _config(folder: Path) -> SynthConfig | None:
    """Return the run's saved config; None if there is none, or if its version differs."""
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        return load_config(SynthConfig, path)
    except UserError:
        return None


def _title(cfg: SynthConfig | None) -> str:
    if cfg is None:
        return "Synthetic translations"
    source, target = map(_name, languages(cfg))
    return f"Synthetic translations, {source} → {target}"


def _name(tag: str) -> str:
    language = find_language(tag)
    return tag if language is None else language.name


def _facts(cfg: SynthConfig, folder: Path) -> list[tuple[str, str]]:
    """Return the facts of the run: data, models, settings."""
    source, target = languages(cfg)
    corpus = read_json(StageFolder(folder, SampleSources.name).path / "counts.json") or {}
    generation, final, judge = cfg.teacher.generation, cfg.final_generation, cfg.filters.llm_judge
    data_source = (
        "local files" if cfg.data.files else f"{cfg.data.madlad_dataset} ({cfg.data.madlad_split})"
    )
    read = (
        f", {corpus['documents']:,} documents of {len(corpus['files']):,} files" if corpus else ""
    )
    if shortfall := corpus.get("shortfall"):
        reasons = ", ".join(f"{cause} {number:,}" for cause, number in shortfall.items())
        read += f"; {corpus['sampled']:,} of {corpus['asked']:,} sources (missing: {reasons})"
    judge_text = "not asked"
    if judge.enabled:
        judge_info = read_json(folder / "service-judge.json") or {}
        judge_text = (
            f"{judge.model or judge_info.get('model', '?')}; one that fails: {judge.fail_policy}"
        )
    scorer = read_json(folder / "service-metricx.json") or {}
    versions = [scorer.get(key) for key in ("revision", "dtype", "device")]
    return [
        ("pair", f"{_name(source)} ({source}) → {_name(target)} ({target})"),
        ("sources", f"{data_source}{read}; seed {cfg.run.seed}"),
        ("teacher", ", revision ".join(filter(None, [cfg.teacher.model, cfg.teacher.revision]))),
        (
            "candidates",
            f"{final.num_candidates} a source, temperature "
            f"{generation.final_temperature:g}, top_p {generation.top_p:g}",
        ),
        ("scorer", ", ".join(filter(None, [cfg.metricx.checkpoint, *versions]))),
        (
            "rules",
            f"all but {', '.join(cfg.filters.rules.off)}"
            if cfg.filters.rules.off
            else "all"
            if cfg.filters.rule_based
            else "none",
        ),
        ("judge", judge_text),
        (
            "on reject",
            "the source is dropped"
            if cfg.filters.on_reject == "drop"
            else f"the next best of {final.store_top_k} candidates is tried",
        ),
    ]


def _settings(cfg: SynthConfig) -> str:
    """Return the run's config as YAML."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _steps(counts: list[StageCounts], stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the funnel. share: percent of the largest stage, for the bar."""
    largest = max(1, *(c.records_out for c in counts))
    return [
        {
            "stage": c.stage,
            "shards": f"{c.done} of {c.shards}",
            "records_in": c.records_in,
            "records_out": c.records_out,
            "rejected": c.records_in - c.records_out,
            "share": round(100 * c.records_out / largest, 2),
            "rate": stages.get(c.stage, {}).get("records_per_s"),
        }
        for c in counts
    ]


def _code_rows(stage: str, counts: Mapping[str, int], records: int) -> list[dict[str, Any]]:
    """Return a row for each code of a stage.

    records: all of which the counts are a part.
    """
    return [
        {"stage": stage, "share": row["count"] / max(1, records), **row} for row in _explain(counts)
    ]


def _spreads(stages: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Return a stage's distributions from stats.json; empty if there are none."""
    return stages.get(stage, {}).get("distributions", {})


def _spread(stages: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the distribution with a name, which one stage has; empty if there is none."""
    candidates = (_spreads(stages, stage).get(name) for stage in stages)
    return next(filter(None, candidates), {})


def _explain(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a row for each code, with its count and meaning."""
    return [{"code": code, "count": n, "meaning": explain(code)} for code, n in counts.items()]


def _unread(folder: Path) -> dict[str, Any]:
    """Return the unreadable documents: counts by code, and the first lines."""
    counts = read_json(StageFolder(folder, SampleSources.name).path / "counts.json") or {}
    lines = [
        {"file": file["file"], **line}
        for file in counts.get("files", ())
        for line in file.get("broken", ())
    ]
    return {
        "documents": counts.get("documents", 0),
        "codes": _explain(counts.get("unreadable", {})),
        "lines": lines[:_LINES],
    }


def _strata(cfg: SynthConfig, order: Sequence[Stage], stages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the funnel of each type and length bucket."""
    strata_by_stage = {
        stage.name: strata
        for stage in order
        if (strata := _spreads(stages, stage.name).get("strata"))
    }
    stage_names = list(strata_by_stage)
    edges = cfg.bucketing.boundaries
    rows = []
    for kind in TYPES:
        names = [f"{kind} {bucket}" for bucket in range(len(edges) - 1)]
        totals = [
            sum(strata_by_stage[stage].get(name, 0) for name in names) for stage in stage_names
        ]
        if not any(totals):
            continue
        rows.append({"title": f"{kind}s", "whole": True, "counts": totals})
        for bucket, name in enumerate(names):
            counts = [strata_by_stage[stage].get(name, 0) for stage in stage_names]
            if any(counts):
                title = f"{edges[bucket]:g} to {edges[bucket + 1]:g} tokens"
                rows.append({"title": title, "whole": False, "counts": counts})
    return {"stages": stage_names, "rows": rows}


def _costs(order: Sequence[Stage], stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the usage: a row for each stage with calls, and a row of totals."""
    rows: list[dict[str, Any]] = []
    for stage in order:
        stage_stats = stages.get(stage.name, {})
        teacher, metricx, judge = (
            stage_stats.get(key) or {} for key in ("teacher", "metricx", "judge")
        )
        if not (
            teacher.get("requests")
            or metricx.get("requests")
            or judge.get("requests")
            or (stage_stats.get("answers") or {}).get("kept")
        ):
            continue
        rows.append(
            {
                "stage": stage.name,
                "seconds": stage_stats.get("seconds", 0),
                "requests": teacher.get("requests", 0),
                "tokens_in": teacher.get("prompt_tokens", 0),
                "tokens_out": teacher.get("completion_tokens", 0),
                "retries": teacher.get("retries", 0),
                "fallbacks": teacher.get("fallbacks", 0),
                "failures": teacher.get("failures", 0)
                + metricx.get("failed", 0)
                + judge.get("failed", 0),
                "scored": metricx.get("samples", 0),
                "judged": judge.get("samples", 0),
                "kept": (stage_stats.get("answers") or {}).get("kept", 0),
                "damaged": (stage_stats.get("answers") or {}).get("damaged", 0),
            }
        )
    if len(rows) > 1:
        totals = {key: sum(row[key] for row in rows) for key in rows[0] if key != "stage"}
        rows.append({"stage": "all", **totals})
    return rows


def _draw(order: Sequence[Stage], stages: Mapping[str, Any]) -> list[str]:
    """Return SVG charts, one for each title with distributions."""
    spreads: dict[tuple[str, str], list[tuple[Mapping[str, Any], str]]] = defaultdict(list)
    for stage in order:
        for chart in stage.charts:
            if spread := _spreads(stages, stage.name).get(chart.spread):
                spreads[chart.title, chart.axis].append((spread, chart.kind))
    charts = [
        chart_image(title, axis, partial(_draw_bars, chart_spreads))
        for (title, axis), chart_spreads in spreads.items()
    ]
    return [svg for svg in charts if svg is not None]


def _draw_bars(spreads: list[tuple[Mapping[str, Any], str]], axes: Any) -> int:
    """Draw histograms with common bins as percentages, so that sets of any size compare."""
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


class Smallest:
    """Keeps the records with the `count` smallest keys."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._candidates: list[tuple[Any, Record]] = []

    def offer(self, key: Any, record: Record) -> None:
        """Add a record."""
        self._candidates.append((key, record))
        if len(self._candidates) > 64 * self._count:
            self._candidates = self._smallest()

    def records(self) -> list[Record]:
        """Return the records in the order of their keys."""
        return [record for _, record in self._smallest()]

    def _smallest(self) -> list[tuple[Any, Record]]:
        return heapq.nsmallest(self._count, self._candidates, key=lambda pair: pair[0])


@dataclass(slots=True)
class Examples:
    """Example pairs of a run.

    accepted: {"title", "records"}.
    rejected: see `_compared_with`.
    rescued: see `_rescue`.
    """

    accepted: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    rescued: list[dict[str, Any]]


def pick_examples(out_dir: Path, stages: Sequence[Stage] = ORDER) -> Examples:
    """Return accepted, rejected and rescued pairs of a run, also of an unfinished one.

    It reads accepted and rejected records once each, with a few records in memory. A source's id is
    a hash of its text, so the smallest ids are a random but reproducible sample.
    """
    random_sample, best, worst = (Smallest(SHOWN) for _ in range(3))
    rescued = Smallest(_RESCUED)
    by_stratum: dict[str, Smallest] = defaultdict(lambda: Smallest(_PER_STRATUM))
    folder = StageFolder(out_dir, FormatFilter.name)
    for record in folder.records() if folder.done() else ():
        name, score = record["source_id"], record["best"]["score"]
        random_sample.offer(name, record)
        best.offer((score, name), record)
        worst.offer((-score, name), record)
        by_stratum[stratum(record)].offer(name, record)
        if record["filters"]["tried"]:
            rescued.offer(name, record)
    kinds = (
        ("Drawn at random", random_sample),
        ("Best scores", best),
        ("Worst scores that were kept", worst),
    )
    accepted = [{"title": title, "records": top.records()} for title, top in kinds]
    accepted_by_stratum = {name: cycle(top.records()) for name, top in by_stratum.items()}
    any_accepted = cycle(random_sample.records() or [None])
    return Examples(
        [kind for kind in accepted if kind["records"]],
        [
            _compared_with(r, next(accepted_by_stratum.get(stratum(r), any_accepted)))
            for r in _rejected(out_dir, stages)
        ],
        [_rescue(record) for record in rescued.records()],
    )


def _rejected(out_dir: Path, stages: Sequence[Stage]) -> Iterator[Record]:
    """Yield a few rejected records for each reason, from stages that check translations."""
    for stage in stages:
        if not stage.shows_rejected:
            continue
        folder = StageFolder(out_dir, stage.name)
        examples_by_code: dict[str, Smallest] = {}
        for record in folder.all_rejected() if folder.done() else ():
            code = record["reason_code"]
            if code in examples_by_code or len(examples_by_code) < _CODES:
                examples_by_code.setdefault(code, Smallest(_REJECTED)).offer(
                    record["source_id"], record
                )
        for code in sorted(examples_by_code):
            yield from examples_by_code[code].records()


def _compared_with(record: Record, accepted: Record | None) -> dict[str, Any]:
    """Return a rejected record next to an accepted pair of the same type and length."""
    code = record["reason_code"]
    return {
        "stage": record["stage"],
        "code": code,
        "meaning": explain(code),
        "seen": record.get("reason") or "",
        "source": record["source_text"],
        "candidate": _candidate(record),
        "beside": accepted,
    }


def _candidate(record: Record) -> str | None:
    """Return the rejected translation if there is a single one and it was stored."""
    if "best" in record:
        return str(record["best"]["text"])
    which = record["reason_code"].partition("_")[0]
    return record.get(which) if which in ("greedy", "sample") else None


def _rescue(record: Record) -> dict[str, Any]:
    """Return a source whose best candidate was rejected and a later one accepted."""
    first = record["filters"]["tried"][0]
    texts = {candidate["index"]: candidate for candidate in record["topk"]}
    refused = texts.get(first["index"], {})
    return {
        "source": record["source_text"],
        "code": first["reason_code"],
        "refused": refused.get("text"),
        "refused_score": refused.get("score"),
        "taken": record["target_text"],
        "taken_score": record["best"]["score"],
        "tried": len(record["filters"]["tried"]),
    }
