"""The curation commands `python -m trainer search buckets|focus|...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.search.curation.command_line import (
    ConfigFile,
    Exclude,
    Out,
    Overrides,
    Overwrite,
    Record,
    Rows,
    Runs,
    Verified,
    curating,
    write,
)
from trainer.search.curation.diagnosis.commands import register as register_truth
from trainer.search.curation.distill.commands import register as register_distil
from trainer.search.curation.verification.commands import verify


def register(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(buckets)
    app.command()(focus)
    app.command()(budget)
    app.command()(verify)
    register_truth(app)
    register_distil(app)


def buckets(
    run: Runs,
    out: Out,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Sort questions: B mastered, A partly solved, 0 unsolved, or unscored."""
    with curating(run, out, config, set_, overwrite) as (cfg, prompts, read):
        from trainer.search.curation.buckets import buckets_page, make_buckets

        write(out, make_buckets(prompts, read, cfg), buckets_page, prompts)


def focus(
    run: Runs,
    out: Out,
    buckets: Annotated[
        Path | None,
        typer.Option(help="Folder of `search buckets`; without it, buckets are made of --run."),
    ] = None,
    verified: Verified = None,
    exclude: Exclude = None,
    record: Record = None,
    rows: Rows = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Select the next round's data: hard and unsolved questions without bad ones."""
    read_paths = [path for path in (buckets, rows, *(verified or ()), *(record or ())) if path]
    with curating(run, out, config, set_, overwrite, read_paths=read_paths) as (cfg, prompts, read):
        from trainer.search.curation.focus import focus_page, make_focus
        from trainer.search.curation.prior_decisions import only_kept, read_known

        decided = read_known(prompts, buckets, verified or (), exclude or (), record or ())
        chosen, digests = only_kept(prompts, rows)
        result = make_focus(chosen, read, cfg, decided)
        result.inputs = {**result.inputs, **digests}
        write(out, result, focus_page, chosen)


def budget(
    run: Runs,
    out: Out,
    rows: Rows = None,
    verified: Verified = None,
    exclude: Exclude = None,
    record: Record = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Set max_turns and n_agent of each row from its earlier episodes."""
    read_paths = [path for path in (rows, *(verified or ()), *(record or ())) if path]
    with curating(run, out, config, set_, overwrite, read_paths=read_paths) as (cfg, prompts, read):
        from trainer.search.curation.budget import budget_page, make_budget
        from trainer.search.curation.prior_decisions import only_kept, read_known

        decided = read_known(prompts, None, verified or (), exclude or (), record or ())
        chosen, digests = only_kept(prompts, rows)
        result = make_budget(chosen, read, cfg, {**decided.inputs, **digests}, decided.record)
        write(out, result, budget_page, chosen)
        for line in result.manifest_extra["lines"]:
            typer.echo(line)
