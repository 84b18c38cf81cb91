"""The command `scorekit score`: its options, what they mean together, and its form with `--url`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import from_json

from scorekit.client.files.metrics import parse_metric
from scorekit.client.files.score_file import ResultCounts, ScoreJob, ScoreRun, first_info
from scorekit.client.files.several_command import SeveralCommand
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.report.worst import ScoredRow, WorstRows, print_worst
from scorekit.rows.parallel import ParallelFiles
from scorekit.rows.read import Format
from scorekit.rows.samples import (
    BadRows,
    Contents,
    JudgeColumns,
    SampleFile,
    TranslationColumns,
    open_rows,
)
from scorekit.schemas import MAX_VOTES, Info, Overlong
from scorekit.streams import stop_waiting

_COLUMNS, _PARALLEL, _JUDGE, _REQUESTS = "Columns", "Parallel files", "Judge", "Requests"

_In = Annotated[
    Path | None,
    typer.Argument(
        metavar="IN",
        help="Samples: .jsonl, .json, .tsv, .csv or .parquet, also gzipped; - is stdin. Not with "
        "parallel files.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT",
        help="Results, one JSON line a sample; - is stdout. With --metric it may be left out: the "
        "systems' means alone are printed then, and nothing is written.",
    ),
]
_Metric = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=URL[#TASK]",
        help="A metric and its service, #TASK of a judge; repeat it for several metrics. OUT.parts "
        "has the scores of each. It stays: a metric added later costs only its own scores.",
    ),
]
_Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="With --metric: a field that OUT repeats; repeat it. Default: src, mt, ref, system.",
    ),
]
_Worst = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Print the N rows with the worst scores of the first metric."
    ),
]
_Url = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of a service, in place of --metric: its results alone are in OUT; repeat it for "
        "replicas."
    ),
]
_FormatOf = Annotated[
    Format | None,
    typer.Option(
        help="Of IN; default: by its ending, of stdin jsonl. tsv-unquoted: every quote is text.",
        rich_help_panel=_COLUMNS,
    ),
]
_Encoding = Annotated[
    str | None,
    typer.Option(
        help="Of the input; default: UTF-8, marked UTF-16, or Korean Windows (cp949).",
        rich_help_panel=_COLUMNS,
    ),
]
_BadRows = Annotated[
    BadRows,
    typer.Option(
        help="Rows that are no samples: refuse the file, or skip them: OUT has invalid_input.",
        rich_help_panel=_COLUMNS,
    ),
]
_Src = Annotated[str, typer.Option(help="Field of the source.", rich_help_panel=_COLUMNS)]
_Mt = Annotated[str, typer.Option(help="Field of the translation.", rich_help_panel=_COLUMNS)]
_Ref = Annotated[str, typer.Option(help="Field of the reference.", rich_help_panel=_COLUMNS)]
_Id = Annotated[str, typer.Option(help="Field of the id.", rich_help_panel=_COLUMNS)]
_Sources = Annotated[
    Path | None,
    typer.Option(
        "-s",
        "--sources",
        metavar="FILE",
        help="Sources, a text a line, in place of IN; wants --metric.",
        rich_help_panel=_PARALLEL,
    ),
]
_Translations = Annotated[
    list[Path] | None,
    typer.Option(
        "-t",
        "--translations",
        metavar="FILE",
        help="Translations of a system, which has the file's name; repeat -t for more systems.",
        rich_help_panel=_PARALLEL,
    ),
]
_References = Annotated[
    Path | None,
    typer.Option(
        "-r", "--references", metavar="FILE", help="References.", rich_help_panel=_PARALLEL
    ),
]
_Task = Annotated[
    str | None,
    typer.Option(
        help="With --url: the rubric, such as translation_filter.", rich_help_panel=_JUDGE
    ),
]
_Variable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=FIELD]",
        help="A variable of the rubric, and the field that holds it; repeat it. Default: every "
        "field but the id; with --metric src, mt, ref, src_lang and tgt_lang.",
        rich_help_panel=_JUDGE,
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A variable that is the same for all rows.",
        rich_help_panel=_JUDGE,
    ),
]
_Model = Annotated[str | None, typer.Option(help="The upstream's model.", rich_help_panel=_JUDGE)]
_Temperature = Annotated[
    float | None,
    typer.Option(min=0, max=2, help="Default: the rubric's.", rich_help_panel=_JUDGE),
]
_MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Most tokens of an answer; default: the rubric's.", rich_help_panel=_JUDGE
    ),
]
_Votes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_VOTES,
        help="mqm: answers a sample; default: the service's.",
        rich_help_panel=_JUDGE,
    ),
]
_Overlong = Annotated[
    Overlong | None,
    typer.Option(
        help="Inputs over the limit: cut and flagged, failed, or in windows.",
        rich_help_panel=_REQUESTS,
    ),
]
_MaxInput = Annotated[
    int | None,
    typer.Option(
        min=16, help="Limit in tokens; default: the model's own.", rich_help_panel=_REQUESTS
    ),
]
_Spans = Annotated[
    Literal["exact", "upstream"] | None,
    typer.Option(help="xCOMET: how spans are given.", rich_help_panel=_REQUESTS),
]
_Priority = Annotated[
    Literal["interactive", "bulk"],
    typer.Option(help="Bulk waits for interactive callers.", rich_help_panel=_REQUESTS),
]
_Batch = Annotated[int, typer.Option(min=1, help="Samples a request.", rich_help_panel=_REQUESTS)]
_InFlight = Annotated[
    int, typer.Option(min=1, help="Requests at once, of each metric.", rich_help_panel=_REQUESTS)
]
_Deadline = Annotated[
    float,
    typer.Option(min=1, help="Seconds for a request, with its retries.", rich_help_panel=_REQUESTS),
]
_CacheDb = Annotated[
    Path | None,
    typer.Option(help="File of a cache of scores on this side.", rich_help_panel=_REQUESTS),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew, whatever OUT holds.")]


def score(
    source: _In = None,
    out: _Out = None,
    metric: _Metric = None,
    keep: _Keep = None,
    worst: _Worst = None,
    url: _Url = None,
    overwrite: _Overwrite = False,
    format: _FormatOf = None,
    encoding: _Encoding = None,
    bad_rows: _BadRows = "refuse",
    src_field: _Src = "src",
    mt_field: _Mt = "mt",
    ref_field: _Ref = "ref",
    id_field: _Id = "id",
    sources: _Sources = None,
    translations: _Translations = None,
    references: _References = None,
    task: _Task = None,
    variable: _Variable = None,
    fixed: _Set = None,
    model: _Model = None,
    temperature: _Temperature = None,
    max_tokens: _MaxTokens = None,
    votes: _Votes = None,
    overlong: _Overlong = None,
    max_input_length: _MaxInput = None,
    span_offsets: _Spans = None,
    priority: _Priority = "bulk",
    batch_size: _Batch = 256,
    max_in_flight: _InFlight = 8,
    deadline: _Deadline = 900.0,
    cache_db: _CacheDb = None,
) -> None:
    """Score a file with one metric or several. After an interruption, the same command resumes.

    A service's API key is read from SCOREKIT_API_KEY. Failed samples have `"ok": false` in OUT and
    are counted at the end. After transient errors the exit code is 3; the same command retries
    those samples. If all samples failed for good, it is 2. Output to stdout cannot be resumed.

    As with comet-score: scorekit score -s src.txt -t a.txt -t b.txt -r ref.txt --metric xcomet=URL
    """
    if (sources or translations or references) and out is None:
        source, out = None, source  # without IN, the only argument is OUT
    is_result = str(out) == "-" or (out is None and bool(metric))
    with clean_exit(stdout="result" if is_result else "log"):
        if str(out) == "-" and sys.stdout is None:  # it was closed: >&-
            raise UserError("OUT -: stdout is closed. Name a file")
        columns = TranslationColumns(src_field, mt_field, ref_field, id_field)
        options = {
            "overlong": overlong,
            "max_input_length": max_input_length,
            "span_offsets": span_offsets,
            "model": model,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "votes": votes,
        }
        options = {name: value for name, value in options.items() if value is not None}
        client = {
            "max_in_flight": max_in_flight,
            "deadline_s": deadline,
            "timeout_s": min(600.0, deadline),
            "cache_db": cache_db,
        }
        job: dict[str, Any] = {
            "priority": priority,
            "batch_size": batch_size,
            "max_in_flight": max_in_flight,
            "overwrite": overwrite,
        }
        variables, constants = _judge_variables(variable or (), fixed or ())
        parallel = _parallel_files(source, sources, translations, references, encoding)
        if parallel and (format or columns != TranslationColumns()):
            raise UserError("--format and --...-field are for IN: parallel files have no columns")
        _check_use(url, metric, keep, task, is_parallel=parallel is not None)
        if metric:
            SeveralCommand(
                sources=[parse_metric(text, files=False) for text in metric],
                file=parallel
                or open_rows(_named("IN", source, "--metric NAME=URL"), format, encoding),
                out=out,
                columns=columns,
                variables=variables,
                constants=constants,
                keep=keep,
                worst=worst,
                options=options,
                bad_rows=bad_rows,
                client=client,
                job=job,
            ).run()
            return
        fields: TranslationColumns | JudgeColumns = columns
        if task is not None:
            fields = JudgeColumns(task, variables, constants, id_field)
        elif variables or constants:
            raise UserError("--variable and --set are a judge's: name its rubric by --task")
        path, out = _named("IN", source, "--url URL"), _named("OUT", out, "--url URL")
        samples = SampleFile(path, format, fields, encoding=encoding, bad_rows=bad_rows)
        target = None if str(out) == "-" else out
        if worst is not None and target is None:
            raise UserError("--worst: no results stay to choose from with OUT -: name a file")
        score_by_url(
            ScoreJob(samples=samples, out=target, options=options, **job), url or [], worst, client
        )


def _check_use(
    url: list[str] | None,
    metric: list[str] | None,
    keep: list[str] | None,
    task: str | None,
    *,
    is_parallel: bool,
) -> None:
    """Raise UserError for options that do not belong together."""
    if url and metric:
        raise UserError("--url and --metric: name the service in one of the two ways")
    if not url and not metric:
        raise UserError("name the service: --metric NAME=URL, or --url URL")
    if metric and task is not None:
        raise UserError("--task is for --url: write --metric NAME=URL#TASK")
    if url and is_parallel:
        raise UserError("parallel files: name the service by --metric NAME=URL, not by --url")
    if url and keep:
        raise UserError("--keep: only with --metric")


def _parallel_files(
    source: Path | None,
    sources: Path | None,
    translations: list[Path] | None,
    references: Path | None,
    encoding: str | None,
) -> ParallelFiles | None:
    """Return the parallel files, if there are some. Raises UserError if one is missing."""
    if not (sources or translations or references):
        return None
    if sources is None or not translations:
        option = "-s FILE (the sources)" if sources is None else "-t FILE (translations)"
        raise UserError(f"parallel files: {option} is missing")
    if source is not None:
        raise UserError(
            f"{source}: parallel files stand in place of IN. Say -t before each file of "
            "translations"
        )
    return ParallelFiles(sources, translations, references, encoding=encoding)


def _named(name: str, path: Path | None, service: str) -> Path:
    if path is None:
        raise UserError(f"{name} is missing: scorekit score IN OUT {service}")
    return path


def _judge_variables(
    variables: Sequence[str], constants: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns and the constant values of a judge's variables. Raises UserError."""
    columns = dict(_pair(variable, default=variable) for variable in variables)
    fixed = dict(_pair(constant, default=None) for constant in constants)
    duplicates = columns.keys() & fixed.keys()
    if duplicates:
        raise UserError(f"--variable and --set both name {sorted(duplicates)[0]!r}")
    return columns, fixed


def _pair(text: str, default: str | None) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if has_value:
        return name, value
    if default is None:
        raise UserError(f"--set {text}: write NAME=VALUE")
    return name, default


def score_by_url(
    job: ScoreJob, urls: list[str], worst: int | None, settings: Mapping[str, Any]
) -> None:
    """Score the file and print a summary.

    worst: number of rows to print.

    Ends the command with 3 after transient errors. Raises UserError if nothing could be scored."""
    from scorekit.client.asynchronous import ScoringClient

    run: ScoreRun | None = None

    async def work() -> tuple[Info, ScoreRun, float]:
        nonlocal run
        async with ScoringClient(urls, **settings) as client:
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
    if worst is not None:
        _print_worst(job, info, task, worst)
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
    direction = "higher" if info.higher_is_better_in(task) else "lower"
    table.add_row(f"mean score ({direction} is better)", f"{tally.mean:.4f}" if tally.ok else "-")
    table.add_row("this run", f"{num_scored:,} samples, {num_scored / seconds:,.0f}/s")
    Console(stderr=to_stderr).print(table)


def _print_worst(job: ScoreJob, info: Info, task: str | None, count: int) -> None:
    from rich.console import Console

    worst = WorstRows(count, info.service, higher_is_better=info.higher_is_better_in(task))
    for row in _scored_rows(job, info.service):
        worst.add(row)
    print_worst(Console(), worst)


def _scored_rows(job: ScoreJob, name: str) -> Iterator[ScoredRow]:
    assert job.out is not None
    with job.out.open("rb") as file:
        for line, raw in zip(job.samples.lines(), file, strict=True):
            texts = {name: text for name, text in line.sample.items() if name != "task"}
            yield ScoredRow(line.number, line.id, None, texts, {name: from_json(raw)})
