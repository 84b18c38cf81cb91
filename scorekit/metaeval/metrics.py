"""Scores of the metrics to evaluate, from a service or from a file."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.files.score_file import ResultCounts, ScoreJob, ScoreRun, first_info
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.metaeval.judgements import JudgedTranslation, Span, checked_span
from scorekit.rows.read import RowFile
from scorekit.rows.samples import JudgeColumns, SampleFile, TranslationColumns
from scorekit.schemas import Info, Overlong


@dataclass(frozen=True)
class MetricSource:
    """A metric. name: in the report. target: URL or file. task: of a judge."""

    name: str
    target: str
    task: str | None = None

    @property
    def is_service(self) -> bool:
        """Return True if the target is a service, False if it is a file."""
        return self.target.startswith(("http://", "https://"))


@dataclass
class MetricScores:
    """Scores and spans by translation; None: no score; no spans, or failed.

    model: that scored. failed: error type -> count. truncated: number of texts not read completely.
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


def parse_metric(text: str) -> MetricSource:
    """Parse NAME=URL, NAME=URL#task or NAME=FILE. Raises UserError."""
    name, equals, target = text.partition("=")
    if not (name.strip() and equals and target.strip()):
        raise UserError(f"--metric {text}: write NAME=URL, NAME=URL#task or NAME=FILE")
    task = None
    if target.startswith(("http://", "https://")):
        target, _, task = target.partition("#")
    elif not Path(target).is_file():
        raise UserError(f"--metric {name}: {target} is neither an http URL nor a file")
    if any(letter in name for letter in "/\\\0") or name.startswith("."):
        raise UserError(
            f"--metric {name}: a name is part of a file's name: no / and no leading dot"
        )
    return MetricSource(name.strip(), target.strip(), task or None)


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
    errors. Every service's /v1/info is read before the first scores. overlong: None for the
    services' own; a judge reads complete texts.

    Raises UserError for a service that needs what the rows do not have, and what the client raises.
    """
    infos = [asyncio.run(_info(source, settings)) for source in sources]
    for source, info in zip(sources, infos, strict=True):
        _check_service(source, info, translations)
    scores = []
    for source, info in zip(sources, infos, strict=True):
        print_line(f"{source.name}: {info.service}, {info.model}")
        out = folder / f"{source.name}.jsonl"
        options = {"overlong": overlong} if overlong and source.task is None else {}
        job = _job(source, info, translations, out, options)
        tally = asyncio.run(_score(source, job, settings))
        if tally.retryable:
            print_line(f"{source.name}: {tally.retryable:,} had transient errors. Run it again")
        scores.append(_read_results(source.name, info, source.task, out, translations))
    return scores


async def _info(source: MetricSource, settings: Mapping[str, Any]) -> Info:
    async with ScoringClient(source.target, **settings) as client:
        return await first_info(client)


def _check_service(
    source: MetricSource, info: Info, translations: Sequence[JudgedTranslation]
) -> None:
    if (info.service == "judge") != (source.task is not None):
        advice = (
            "name its task: NAME=URL#mqm" if source.task is None else "leave out #" + source.task
        )
        raise UserError(f"--metric {source.name}: the service is {info.service}: {advice}")
    if source.task is not None and info.tasks is not None and source.task not in info.tasks:
        valid_tasks = ", ".join(sorted(info.tasks))
        raise UserError(
            f"--metric {source.name}: the judge has no task {source.task}; it has {valid_tasks}"
        )
    num_missing = sum(not translation.ref for translation in translations)
    if num_missing and (info.inputs or {}).get("ref") == "required":
        raise UserError(
            f"--metric {source.name}: requires references, but {num_missing:,} of "
            f"{len(translations):,} translations have none: add `ref` to the rows, "
            "or name a system by --ref-system"
        )


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


async def _score(source: MetricSource, job: ScoreJob, settings: Mapping[str, Any]) -> ResultCounts:
    contents = job.check()
    async with ScoringClient(source.target, **settings) as client:
        run = ScoreRun(job, client)
        await run.run(await first_info(client), contents)
    return run.tally


def _read_results(
    name: str, info: Info, task: str | None, path: Path, translations: Sequence[JudgedTranslation]
) -> MetricScores:
    described = info.tasks[task] if task is not None and info.tasks else info
    higher_is_better = described.higher_is_better
    scores = MetricScores(name, info.model, higher_is_better, [], [], {})
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
