"""python -m scorekit score --url URL IN OUT; python -m scorekit fetch [MODEL...]"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from scorekit.errors import RequestError, ScorekitError, ServiceUnreachable, UserError
from scorekit.samplefile import Contents, Fields, SampleFile
from scorekit.schemas import Info
from scorekit.scorefile import ScoreJob, Tally, first_info

#: What the services load: the variable that tells them, and where it is not set.
DEFAULT_MODELS = {
    "METRICX_MODEL": "google/metricx-24-hybrid-large-v2p6",
    "XCOMET_MODEL": "Unbabel/XCOMET-XL",
}

app = typer.Typer(
    help="Score translations with a running scoring service; fetch the services' checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def score(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Samples: .jsonl or .tsv.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Results, one JSON line a sample.")],
    url: Annotated[list[str], typer.Option(help="URL of the service; repeat it for replicas.")],
    format: Annotated[
        Literal["jsonl", "tsv"] | None, typer.Option(help="Of IN; default: by its ending.")
    ] = None,
    src_field: Annotated[str, typer.Option(help="Field of the source.")] = "src",
    mt_field: Annotated[str, typer.Option(help="Field of the translation.")] = "mt",
    ref_field: Annotated[str, typer.Option(help="Field of the reference.")] = "ref",
    id_field: Annotated[str, typer.Option(help="Field of the id.")] = "id",
    overlong: Annotated[
        Literal["truncate", "error"] | None,
        typer.Option(help="Inputs over the limit: cut and flagged, or failed."),
    ] = None,
    max_input_length: Annotated[
        int | None, typer.Option(min=16, help="Limit in tokens; default: the model's own.")
    ] = None,
    span_offsets: Annotated[
        Literal["exact", "upstream"] | None, typer.Option(help="xCOMET: how spans are given.")
    ] = None,
    priority: Annotated[
        Literal["interactive", "bulk"], typer.Option(help="Bulk waits for interactive callers.")
    ] = "bulk",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a request.")] = 256,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds for a request, with its retries.")
    ] = 900.0,
    cache_db: Annotated[
        Path | None, typer.Option(help="File of a cache of scores on this side.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew, whatever OUT holds.")
    ] = False,
) -> None:
    """Score a file. Started again after an interruption, it goes on where it stopped.

    A service's API key is read from SCOREKIT_API_KEY. Samples that fail stand in OUT with
    `"ok": false` and are counted at the end; they do not change the exit code.
    """
    options: dict[str, Any] = {
        "overlong": overlong,
        "max_input_length": max_input_length,
        "span_offsets": span_offsets,
    }
    try:
        job = ScoreJob(
            samples=SampleFile(source, format, Fields(src_field, mt_field, ref_field, id_field)),
            out=out,
            options={name: value for name, value in options.items() if value is not None},
            priority=priority,
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            overwrite=overwrite,
        )
        _run(job, url, deadline_s=deadline, timeout_s=min(600.0, deadline), cache_db=cache_db)
    except ScorekitError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(_exit_code(error)) from None


@app.command()
def fetch(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Hub ids.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the one MODEL; default: its newest.")
    ] = None,
) -> None:
    """Bring checkpoints, with the tokenizers that they need, into HF_HOME ahead of time.

    Without a MODEL: what METRICX_MODEL and XCOMET_MODEL name, else the services' defaults. An
    interrupted download goes on where it was.
    """
    from scorekit.hub import fetch_checkpoint, size_of

    try:
        if revision is not None and len(models or ()) != 1:
            raise UserError("--revision: name the one model that it is a revision of")
        for model in models or [os.environ.get(n) or d for n, d in DEFAULT_MODELS.items()]:
            for name, folder in fetch_checkpoint(model, revision):
                typer.echo(f"{name}: {size_of(folder) / 1e9:.2f} GB in {folder}")
    except UserError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from there", err=True)
        raise typer.Exit(130) from None


def _run(job: ScoreJob, urls: list[str], **settings: Any) -> None:
    from scorekit.async_client import ScoringClient
    from scorekit.progress import progress_bar

    tally: Tally | None = None

    async def work(contents: Contents) -> tuple[Info, Tally, int, float]:
        nonlocal tally
        async with ScoringClient(
            urls, max_in_flight=job.max_in_flight, pin_model=True, **settings
        ) as client:
            info = await first_info(client, len(urls))
            with ExitStack() as stack:
                started, before = time.monotonic(), 0

                def on_start(found: Tally) -> Callable[[int], None]:
                    nonlocal tally, before
                    tally, before = found, found.done
                    return stack.enter_context(progress_bar(contents.samples, before))

                done = await job.run(client, info, contents, on_start)
                return info, done, done.done - before, time.monotonic() - started

    try:
        result = asyncio.run(work(job.check()))
    except KeyboardInterrupt:
        at = f" after {tally.done} samples" if tally else ""
        typer.echo(f"stopped{at}; the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    _print_summary(*result)


def _print_summary(info: Info, tally: Tally, scored: int, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{info.service}: {info.model}", show_header=False)
    table.add_row("scored", f"{tally.ok:,}")
    for type, count in sorted(tally.failed.items()):
        table.add_row(f"failed: {type}", f"{count:,}")
    direction = "higher" if info.higher_is_better else "lower"
    table.add_row(f"mean score ({direction} is better)", f"{tally.mean:.4f}" if tally.ok else "-")
    table.add_row("this run", f"{scored:,} samples, {scored / seconds:,.0f}/s")
    Console().print(table)


def _exit_code(error: ScorekitError) -> int:
    """2 where the user can mend it (a wrong URL, key or option), 1 where a service is at fault."""
    if isinstance(error, ServiceUnreachable):
        return 1 if error.retryable else 2
    if isinstance(error, RequestError):
        return 2 if error.status in (401, 404, 405, 422) else 1
    return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    app(prog_name="python -m scorekit")
