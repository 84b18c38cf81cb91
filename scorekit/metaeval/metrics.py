"""Scores of the metrics to evaluate, from a service or from a file."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.client.files.metrics import MetricSource, ServedMetric, check_references, connected
from scorekit.client.files.score_file import ScoreJob, ScoreRun
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.metaeval.judgements import JudgedTranslation, Span, checked_span
from scorekit.rows.read import RowFile
from scorekit.rows.samples import JudgeColumns, SampleFile, TranslationColumns
from scorekit.schemas import Info, Overlong


@dataclass
class MetricScores:
    """Scores and spans by translation; None: no score; no spans, or failed.

    model: that scored.
    failed: error type -> count.
    truncated: number of texts not read completely.
    repeated: number of rows that say the same of a translation as an earlier row.
    """

    name: str
    model: str
    higher_is_better: bool
    scores: list[float | None]
    spans: list[list[Span] | None]
    failed: dict[str, int]
    truncated: int = 0
    repeated: int = 0

    @property
    def has_spans(self) -> bool:
        """Return True if it marks errors at all."""
        return any(spans is not None for spans in self.spans)


def service_scores(
    sources: Sequence[MetricSource],
    translations: Sequence[JudgedTranslation],
    folder: Path,
    print_line: Callable[[str], None],
    overlong: Overlong | None = None,
    **settings: Any,
) -> list[MetricScores]:
    """Score the translations with the services, one after another.

    Results are stored in `folder` (NAME.jsonl): the same call resumes there, and retries transient
    errors. Every service's /v1/info is read before the first scores.
    overlong: None for the services' own; a judge reads complete texts.

    Raises UserError for a service that needs what the rows do not have, and what the client raises.
    """
    return asyncio.run(_score(sources, translations, folder, print_line, overlong, settings))


async def _score(
    sources: Sequence[MetricSource],
    translations: Sequence[JudgedTranslation],
    folder: Path,
    print_line: Callable[[str], None],
    overlong: Overlong | None,
    settings: Mapping[str, Any],
) -> list[MetricScores]:
    scores = []
    async with connected(sources, **settings) as metrics:
        missing = sum(not translation.ref for translation in translations)
        remedy = "add `ref` to the rows, or name a system by --ref-system"
        check_references(metrics, missing, len(translations), remedy)
        for metric in metrics:
            name = metric.source.name
            print_line(f"{name}: {metric.info.service}, {metric.info.model}")
            out = folder / f"{name}.jsonl"
            options = {"overlong": overlong} if overlong and metric.source.task is None else {}
            job = _job(metric.source, metric.info, translations, out, options)
            run = ScoreRun(job, metric.client)
            await run.run(metric.info, job.check())
            if run.tally.retryable:
                print_line(f"{name}: {run.tally.retryable:,} had transient errors. Run it again")
            scores.append(_read_results(metric, out, translations))
    return scores


def _job(
    source: MetricSource,
    info: Info,
    translations: Sequence[JudgedTranslation],
    out: Path,
    options: dict[str, Any],
) -> ScoreJob:
    wants_ref = (info.inputs or {"ref": "optional"}).get("ref") != "ignored"
    names = ("src", "mt", "src_lang", "tgt_lang") if source.task else ("src", "mt")
    lines = []
    for translation in translations:
        sample = {
            name: getattr(translation, name)
            for name in names
            if getattr(translation, name) is not None
        }
        if wants_ref and translation.ref:
            sample["ref"] = translation.ref
        lines.append(json.dumps(sample, ensure_ascii=False) + "\n")
    path = out.with_name(f"{source.name}.samples.jsonl")
    write_atomic(path, "".join(lines))
    fields = TranslationColumns() if source.task is None else JudgeColumns(source.task, {}, {})
    samples = SampleFile(path, None, fields)
    remedy = "name another OUT, or delete that file"
    return ScoreJob(samples=samples, out=out, options=options, remedy=remedy)


def _read_results(
    metric: ServedMetric, path: Path, translations: Sequence[JudgedTranslation]
) -> MetricScores:
    info = metric.info
    scores = MetricScores(metric.source.name, info.model, metric.higher_is_better, [], [], {})
    for number, row, _ in RowFile(path).rows((), None):
        _add(scores, row, len(translations[number - 1].mt), f"{path}, line {number}")
    return scores


def file_scores(
    source: MetricSource, translations: Sequence[JudgedTranslation], higher_is_better: bool
) -> MetricScores:
    """Return the scores of a file: rows with `score` and, if it marks errors, `error_spans`.

    Each row belongs to the translation with its `src` and `mt`. A row with `ok` false or a null
    score failed; so did a translation without a row (`absent`). Rows that say the same of a
    translation count once.

    Raises UserError for an invalid row, for rows that differ about a translation, and if no row
    belongs to any translation.
    """
    file = RowFile(Path(source.target))
    rows: dict[tuple[str, str], tuple[int, Mapping[str, Any]]] = {}
    repeated = 0
    for number, row, _ in file.rows(("src", "mt", "score"), None):
        for name in ("src", "mt"):
            if not isinstance(row.get(name), str):
                raise UserError(f"{file.path}, line {number}: no text {name!r}")
        first_number, first = rows.setdefault((row["src"], row["mt"]), (number, row))
        if first_number != number:
            _check_equal(first, row, f"{file.path}, lines {first_number} and {number}")
            repeated += 1
    scores = MetricScores(source.name, file.path.name, higher_is_better, [], [], {})
    scores.repeated = repeated
    absent: Mapping[str, Any] = {"ok": False, "error": {"type": "absent"}}
    for translation in translations:
        number, fields = rows.get((translation.src, translation.mt), (0, absent))
        _add(scores, fields, len(translation.mt), f"{file.path}, line {number}")
    if scores.failed.get("absent") == len(translations):
        raise UserError(f"{file.path}: none of its {len(rows):,} rows is one of the translations")
    return scores


def _check_equal(first: Mapping[str, Any], row: Mapping[str, Any], location: str) -> None:
    """Raise UserError if two rows of one translation differ in score or spans."""
    for name in ("score", "error_spans"):
        values = [None if r.get("ok") is False else r.get(name) for r in (first, row)]
        if name == "score":
            values = [_as_number(value) for value in values]
        if values[0] != values[1]:
            raise UserError(
                f"{location}: two rows of one translation (equal 'src' and 'mt') differ in "
                f"{name!r}. Remove one of them"
            )


def _as_number(score: Any) -> Any:
    """Return a score as a number, as `_add` reads it; anything else as it is."""
    try:
        return None if score == "" else float(score)
    except (TypeError, ValueError):
        return score


def _add(scores: MetricScores, row: Mapping[str, Any], length: int, location: str) -> None:
    score = row.get("score")
    if row.get("ok") is False or score in (None, ""):
        error = row.get("error")
        type = error.get("type", "failed") if isinstance(error, Mapping) else "failed"
        scores.failed[type] = scores.failed.get(type, 0) + 1
        scores.scores.append(None)
        scores.spans.append(None)
        return
    try:
        number = float(score)
        if not math.isfinite(number) or isinstance(score, bool):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(f"{location}: score {score!r} is not a number") from None
    spans = row.get("error_spans")
    if spans is not None and not (
        isinstance(spans, list) and all(isinstance(span, Mapping) for span in spans)
    ):
        raise UserError(f"{location}: field 'error_spans' is not a list of objects")
    try:
        valid_spans = None if spans is None else [checked_span(span, length) for span in spans]
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    scores.scores.append(number)
    scores.spans.append(
        None if valid_spans is None else [s for s in valid_spans if s.end > s.start]
    )
    scores.truncated += any((row.get("truncated") or {}).values())
