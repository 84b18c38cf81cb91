"""The command `python -m scorekit score`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from scorekit.client.files.score_file import ResultCounts, ScoreJob, ScoreRun, first_info
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.rows.read import Format
from scorekit.rows.samples import (
    BadRows,
    Contents,
    JudgeColumns,
    SampleFile,
    TranslationColumns,
)
from scorekit.schemas import MAX_VOTES, Info, Overlong
from scorekit.streams import stop_waiting

_In = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="Samples: .jsonl, .json, .tsv, .csv or .parquet, also gzipped; - is stdin.",
    ),
]
_Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Results, one JSON line a sample; - is stdout.")
]
_Url = Annotated[list[str], typer.Option(help="URL of the service; repeat it for replicas.")]
_FormatOf = Annotated[
    Format | None,
    typer.Option(
        help="Of IN; default: by its ending, of stdin jsonl. tsv-unquoted: every quote is text."
    ),
]
_Encoding = Annotated[
    str | None,
    typer.Option(help="Of IN; default: UTF-8, marked UTF-16, or Korean Windows (cp949)."),
]
_BadRows = Annotated[
    BadRows,
    typer.Option(
        help="Rows that are no samples: refuse the file, or skip them: OUT has invalid_input."
    ),
]
_Src = Annotated[str, typer.Option(help="Field of the source.")]
_Mt = Annotated[str, typer.Option(help="Field of the translation.")]
_Ref = Annotated[str, typer.Option(help="Field of the reference.")]
_Id = Annotated[str, typer.Option(help="Field of the id.")]
_Overlong = Annotated[
    Overlong | None,
    typer.Option(help="Inputs over the limit: cut and flagged, failed, or in windows."),
]
_MaxInput = Annotated[
    int | None, typer.Option(min=16, help="Limit in tokens; default: the model's own.")
]
_Spans = Annotated[
    Literal["exact", "upstream"] | None, typer.Option(help="xCOMET: how spans are given.")
]
_Task = Annotated[str | None, typer.Option(help="Judge: the rubric, such as translation_filter.")]
_Variable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=FIELD]",
        help="Judge: a variable of the rubric, and the field that holds it; repeat it. Default: "
        "every field but the id.",
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Judge: a variable that is the same for all rows."
    ),
]
_Model = Annotated[str | None, typer.Option(help="Judge: the upstream's model.")]
_Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="Judge: default: the rubric's.")
]
_MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Judge: most tokens of an answer; default: the rubric's.")
]
_Votes = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_VOTES, help="Judge, mqm: answers a sample; default: the service's."
    ),
]
_Priority = Annotated[
    Literal["interactive", "bulk"], typer.Option(help="Bulk waits for interactive callers.")
]
_Batch = Annotated[int, typer.Option(min=1, help="Samples a request.")]
_InFlight = Annotated[int, typer.Option(min=1, help="Requests at once.")]
_Deadline = Annotated[float, typer.Option(min=1, help="Seconds for a request, with its retries.")]
_CacheDb = Annotated[Path | None, typer.Option(help="File of a cache of scores on this side.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew, whatever OUT holds.")]


def score(
    source: _In,
    out: _Out,
    url: _Url,
    format: _FormatOf = None,
    encoding: _Encoding = None,
    bad_rows: _BadRows = "refuse",
    src_field: _Src = "src",
    mt_field: _Mt = "mt",
    ref_field: _Ref = "ref",
    id_field: _Id = "id",
    overlong: _Overlong = None,
    max_input_length: _MaxInput = None,
    span_offsets: _Spans = None,
    task: _Task = None,
    variable: _Variable = None,
    fixed: _Set = None,
    model: _Model = None,
    temperature: _Temperature = None,
    max_tokens: _MaxTokens = None,
    votes: _Votes = None,
    priority: _Priority = "bulk",
    batch_size: _Batch = 256,
    max_in_flight: _InFlight = 8,
    deadline: _Deadline = 900.0,
    cache_db: _CacheDb = None,
    overwrite: _Overwrite = False,
) -> None:
    """Score a file. After an interruption, the same command resumes where it stopped.

    A service's API key is read from SCOREKIT_API_KEY. Failed samples have `"ok": false` in OUT and
    are counted at the end. After transient errors the exit code is 3; the same command retries
    those samples. If all samples failed for good, it is 2. Output to stdout cannot be resumed.
    """
    options = {
        "overlong": overlong,
        "max_input_length": max_input_length,
        "span_offsets": span_offsets,
        "model": model,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "votes": votes,
    }
    with clean_exit(stdout="result" if str(out) == "-" else "log"):
        fields: TranslationColumns | JudgeColumns = TranslationColumns(
            src_field, mt_field, ref_field, id_field
        )
        if task is not None:
            fields = _judge_fields(task, variable or (), fixed or (), id_field)
        elif variable or fixed:
            raise UserError("--variable and --set are a judge's: name its rubric by --task")
        if str(out) == "-" and sys.stdout is None:  # it was closed: >&-
            raise UserError("OUT -: stdout is closed. Name a file")
        job = ScoreJob(
            samples=SampleFile(source, format, fields, encoding=encoding, bad_rows=bad_rows),
            out=None if str(out) == "-" else out,
            options={name: value for name, value in options.items() if value is not None},
            priority=priority,
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            overwrite=overwrite,
        )
        _run(job, url, deadline_s=deadline, timeout_s=min(600.0, deadline), cache_db=cache_db)


def _judge_fields(
    task: str, variables: Sequence[str], constants: Sequence[str], id: str
) -> JudgeColumns:
    named = dict(_pair(variable, default=variable) for variable in variables)
    fixed = dict(_pair(constant, default=None) for constant in constants)
    duplicates = named.keys() & fixed.keys()
    if duplicates:
        raise UserError(f"--variable and --set both name {sorted(duplicates)[0]!r}")
    return JudgeColumns(task, named, fixed, id)


def _pair(text: str, default: str | None) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if has_value:
        return name, value
    if default is None:
        raise UserError(f"--set {text}: write NAME=VALUE")
    return name, default


def _run(job: ScoreJob, urls: list[str], **settings: Any) -> None:
    from scorekit.client.asynchronous import ScoringClient

    run: ScoreRun | None = None

    async def work() -> tuple[Info, ScoreRun, float]:
        nonlocal run
        async with ScoringClient(urls, max_in_flight=job.max_in_flight, **settings) as client:
            info = await first_info(client)
            started, run = time.monotonic(), ScoreRun(job, client)
            await run.run(info, contents)
            return info, run, time.monotonic() - started

    try:
        contents = job.check()
        info, finished, seconds = asyncio.run(work())
    except KeyboardInterrupt:
        stop_waiting()
        progress = ""
        if run is not None and run.num_before is not None:
            progress = f" after {run.tally.done + run.tally.early} samples"
        typer.echo(f"stopped{progress}; the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    totals = finished.tally
    num_scored = totals.done - (finished.num_before or 0)
    fields = job.samples.fields
    task = fields.task if isinstance(fields, JudgeColumns) else None
    _print_summary(
        info, totals, contents, num_scored, seconds, task=task, to_stderr=job.out is None
    )
    if totals.retryable:
        hint = "" if job.out is None else "; the same command retries them"
        typer.echo(f"{totals.retryable:,} samples had transient errors{hint}", err=True)
        raise typer.Exit(3)
    if totals.done and not totals.ok:
        types = ", ".join(f"{type}: {count:,}" for type, count in sorted((+totals.failed).items()))
        raise UserError(
            f"{job.out or 'stdout'}: none of {totals.done:,} samples was scored ({types}): "
            "each line has its error"
        )


def _print_summary(
    info: Info,
    tally: ResultCounts,
    contents: Contents,
    num_scored: int,
    seconds: float,
    *,
    task: str | None,
    to_stderr: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{info.service}: {info.model}", show_header=False)
    table.add_row("scored", f"{tally.ok:,}")
    if tally.judged or (info.service == "judge" and not tally.ok):
        table.add_row("passed", f"{tally.passed:,}")
    for type, count in sorted(tally.failed.items()):
        if count:
            table.add_row(f"failed: {type}", f"{count:,}")
    if contents.blank:
        table.add_row("blank rows, skipped", f"{contents.blank:,}")
    if contents.empty:
        table.add_row("empty translations", f"{contents.empty:,}")
    direction_info = (info.tasks or {}).get(task or "", info)
    direction = "higher" if direction_info.higher_is_better else "lower"
    table.add_row(f"mean score ({direction} is better)", f"{tally.mean:.4f}" if tally.ok else "-")
    table.add_row("this run", f"{num_scored:,} samples, {num_scored / seconds:,.0f}/s")
    Console(stderr=to_stderr).print(table)
