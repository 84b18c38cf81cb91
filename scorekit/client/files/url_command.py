"""`scorekit score --url`: a file with the results of one service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from pydantic_core import from_json

from scorekit.client.files.score_file import ResultCounts, ScoreJob, ScoreRun, first_info
from scorekit.errors import UserError
from scorekit.report.worst import ScoredRow, WorstRows, print_worst
from scorekit.rows.samples import Contents, JudgeColumns
from scorekit.schemas import Info
from scorekit.streams import stop_waiting


def score_by_url(
    job: ScoreJob, urls: list[str], worst: int | None, settings: Mapping[str, Any]
) -> None:
    """Score the file and print a summary. worst: number of rows to print.

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
