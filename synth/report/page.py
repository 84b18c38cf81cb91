"""report.html of a run: what became of the sources, how scores and lengths are spread, pairs.

The page is one file, with no script and nothing fetched from elsewhere; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.languages import find_language
from scorekit.report.page import STYLE, picture
from scorekit.report.render import visible
from synth.config import SynthConfig, languages
from synth.folder.stats import STAGES, StageCounts, duration, funnel
from synth.folder.store import StageFolder, read_json
from synth.report.examples import pick_examples
from synth.report.reasons import explain
from synth.sources.sampling import TYPES

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
        (
            ("prefilter_score", "score_greedy", "greedy"),
            ("prefilter_score", "score_sample", "sample"),
        ),
        "MetricX score (lower is better)",
    ),
    (
        "Score of the candidates",
        (
            ("score_select_best", "score_best", "best"),
            ("score_select_best", "score_worst", "worst"),
        ),
        "MetricX score (lower is better)",
    ),
    (
        "Length in characters",
        (("format_filter", "source_chars", "source"), ("format_filter", "target_chars", "target")),
        "characters",
    ),
    (
        "Length in tokens",
        (
            ("format_filter", "source_tokens", "source"),
            ("format_filter", "target_tokens", "target"),
        ),
        "tokens, nearly",
    ),
)
BARS = 40  # of a picture
_LINES = 10  # of files, that could not be read
#: Stages whose records are counted by type and length bucket.
_STRATA = (
    "sample_sources",
    "prefilter_score",
    "select_sources",
    "score_select_best",
    "format_filter",
)


def write_report(out_dir: str | Path, title: str | None = None) -> Path:
    """Write report.html into a run's folder from stats.json, the config that was kept and the
    stages' records.

    Raises UserError where no stage was begun there.
    """
    folder = Path(out_dir)
    counts = funnel(folder)
    if not counts:
        raise UserError(f"{folder}: no run here (no stage was begun)")
    stages = _read_stages(folder)
    cfg = _config(folder)
    environment = Environment(
        loader=PackageLoader("synth.report", "."), autoescape=select_autoescape(["html"])
    )
    environment.filters["visible"] = lambda text: "\n".join(map(visible, text.split("\n")))
    environment.filters["duration"] = duration
    page = environment.get_template("report.html").render(
        title=title or _title(cfg),
        style=Markup(STYLE),
        tags=languages(cfg) if cfg else ("", ""),
        facts=_facts(cfg, folder) if cfg else [],
        settings=_settings(cfg) if cfg else "",
        steps=_steps(counts, stages),
        rejections=_rejections(counts),
        told=_told(counts),
        candidates=_out_of_the_race(stages),
        unread=_unread(folder),
        strata=_strata(cfg, stages) if cfg else {},
        rescued=_spread(stages, "format_filter", "rescued"),
        pictures=[Markup(svg) for svg in _draw(stages)],
        costs=_costs(stages),
        judge=_spread(stages, "format_filter", "judge"),
        examples=pick_examples(folder),
    )
    path = folder / "report.html"
    write_atomic(path, page.encode())
    return path


def _config(folder: Path) -> SynthConfig | None:
    """The config that the run keeps; None where there is none, or one of another version."""
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
    """Who did what to what."""
    source, target = languages(cfg)
    corpus = read_json(StageFolder(folder, "sample_sources").path / "counts.json") or {}
    generation, final, judge = cfg.teacher.generation, cfg.final_generation, cfg.filters.llm_judge
    where = (
        "local files" if cfg.data.files else f"{cfg.data.madlad_dataset} ({cfg.data.madlad_split})"
    )
    read = (
        f", {corpus['documents']:,} documents of {len(corpus['files']):,} files" if corpus else ""
    )
    asked = "not asked"
    if judge.enabled:
        told = read_json(folder / "service-judge.json") or {}
        asked = f"{judge.model or told.get('model', '?')}; one that fails: {judge.fail_policy}"
    scorer = read_json(folder / "service-metricx.json") or {}
    versions = [scorer.get(key) for key in ("revision", "dtype", "device")]
    return [
        ("pair", f"{_name(source)} ({source}) → {_name(target)} ({target})"),
        ("sources", f"{where}{read}; seed {cfg.run.seed}"),
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
        ("judge", asked),
        (
            "on reject",
            "the source is dropped"
            if cfg.filters.on_reject == "drop"
            else f"the next best of {final.store_top_k} candidates is tried",
        ),
    ]


def _settings(cfg: SynthConfig) -> str:
    """The config as it ran."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
        {
            "stage": c.stage,
            "code": code,
            "count": count,
            "share": count / max(1, c.records_in),
            "meaning": explain(code),
        }
        for c in counts
        for code, count in sorted(c.rejected.items(), key=lambda item: (-item[1], item[0]))
    ]


def _told(counts: Iterable[StageCounts]) -> list[dict[str, Any]]:
    """What is to be known of records that went on."""
    return [
        {
            "stage": c.stage,
            "code": code,
            "count": count,
            "share": count / max(1, c.records_out),
            "meaning": explain(code),
        }
        for c in counts
        for code, count in c.told.items()
    ]


def _spread(stages: Mapping[str, Any], stage: str, name: str) -> dict[str, Any]:
    """A distribution of stats.json; empty where there is none."""
    return stages.get(stage, {}).get("distributions", {}).get(name) or {}


def _out_of_the_race(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Candidates that could not compete for the best score, by reason."""
    found = _spread(stages, "score_select_best", "candidates_out")
    return [
        {"code": code, "count": count, "meaning": explain(code)} for code, count in found.items()
    ]


def _unread(folder: Path) -> dict[str, Any]:
    """Documents that could not be read: how many by code, and the first lines of all files."""
    counts = read_json(StageFolder(folder, "sample_sources").path / "counts.json") or {}
    codes = counts.get("unreadable", {})
    lines = [
        {"file": file["file"], **line}
        for file in counts.get("files", ())
        for line in file.get("broken", ())
    ]
    return {
        "documents": counts.get("documents", 0),
        "codes": [{"code": c, "count": n, "meaning": explain(c)} for c, n in codes.items()],
        "lines": lines[:_LINES],
    }


def _strata(cfg: SynthConfig, stages: Mapping[str, Any]) -> dict[str, Any]:
    """The funnel of each type and length bucket: records that each stage let through."""
    found = {stage: _spread(stages, stage, "strata") for stage in _STRATA}
    shown = [stage for stage in _STRATA if found[stage]]
    edges = cfg.bucketing.boundaries
    rows = []
    for kind in TYPES:
        names = [f"{kind} {bucket}" for bucket in range(len(edges) - 1)]
        whole = [sum(found[stage].get(name, 0) for name in names) for stage in shown]
        if not any(whole):
            continue
        rows.append({"title": f"{kind}s", "whole": True, "counts": whole})
        for bucket, name in enumerate(names):
            counts = [found[stage].get(name, 0) for stage in shown]
            if any(counts):
                title = f"{edges[bucket]:g} to {edges[bucket + 1]:g} tokens"
                rows.append({"title": title, "whole": False, "counts": counts})
    return {"stages": shown, "rows": rows}


def _costs(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was spent: a row a stage that asked somebody, and one for all of them."""
    rows: list[dict[str, Any]] = []
    for name in STAGES:
        told = stages.get(name, {})
        teacher, metricx, judge = (told.get(key) or {} for key in ("teacher", "metricx", "judge"))
        if not (
            teacher.get("requests")
            or metricx.get("requests")
            or judge.get("requests")
            or (told.get("answers") or {}).get("kept")
        ):
            continue
        rows.append(
            {
                "stage": name,
                "seconds": told.get("seconds", 0),
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
                "kept": (told.get("answers") or {}).get("kept", 0),
                "damaged": (told.get("answers") or {}).get("damaged", 0),
            }
        )
    if len(rows) > 1:
        whole = {key: sum(row[key] for row in rows) for key in rows[0] if key != "stage"}
        rows.append({"stage": "all", **whole})
    return rows


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
