"""The commands `scorekit search buckets|focus|budget`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.search.curation.command_line import CurationOptions, curation_command


@curation_command("run", "out", "config", "set_", "overwrite")
def buckets(options: CurationOptions) -> None:
    """Sort questions: B mastered, A partly solved, 0 unsolved, or unscored."""
    with options.curating() as (cfg, prompts, read):
        from trainer.search.curation.buckets import buckets_page, make_buckets

        options.write(make_buckets(prompts, read, cfg), buckets_page, prompts)


@curation_command(
    *("run", "out", "buckets", "verified", "exclude", "record", "rows"),
    *("config", "set_", "overwrite"),
)
def focus(
    options: CurationOptions,
    buckets: Annotated[
        Path | None,
        typer.Option(help="Folder of `search buckets`; without it, buckets are made of --run."),
    ] = None,
) -> None:
    """Select the next round's data: hard and unsolved questions without bad ones."""
    with options.curating(*([buckets] if buckets else [])) as (cfg, prompts, read):
        from trainer.search.curation.focus import focus_page, make_focus
        from trainer.search.curation.prior_decisions import only_kept

        decided = options.prior_decisions(prompts, buckets)
        chosen, decided = only_kept(prompts, options.rows, decided)
        options.write(make_focus(chosen, read, cfg, decided), focus_page, chosen)


@curation_command(
    *("run", "out", "rows", "verified", "exclude", "record", "config", "set_", "overwrite")
)
def budget(options: CurationOptions) -> None:
    """Set max_turns and n_agent of each row from its earlier episodes."""
    with options.curating() as (cfg, prompts, read):
        from trainer.search.curation.budget import budget_page, make_budget
        from trainer.search.curation.prior_decisions import only_kept

        decided = options.prior_decisions(prompts)
        chosen, decided = only_kept(prompts, options.rows, decided)
        result = make_budget(chosen, read, cfg, decided)
        options.write(result, budget_page, chosen)
        for line in result.manifest_extra["lines"]:
            typer.echo(line)
