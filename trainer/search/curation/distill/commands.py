"""The commands `python -m trainer search distill|rewrite`."""

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
    Runs,
    Verified,
    configured,
    curating,
    write,
)


def register(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(distill)
    app.command()(rewrite)


def distill(
    run: Runs,
    out: Out,
    record: Record = None,
    verified: Verified = None,
    exclude: Exclude = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn the rare right episodes of prompts that mostly fail into rows for `trainer sft`."""
    from trainer.search.curation.distill.choose import EpisodeTextStore

    texts, read_paths = EpisodeTextStore(), [*(record or ()), *(verified or ())]
    with curating(run, out, config, set_, overwrite, visit=texts.visit, read_paths=read_paths) as (
        cfg,
        prompts,
        read,
    ):
        from trainer.search.curation.distill.distill import (
            distill_page,
            distilled_rows,
            make_distilled,
        )
        from trainer.search.curation.distill.spool import row_spool, write_sft_rows
        from trainer.search.curation.prior_decisions import read_known

        decided = read_known(prompts, None, verified or (), exclude or (), record or ())
        with row_spool() as spool:
            curated = make_distilled(prompts, texts.spool, read, cfg, spool, decided)
            rows = distilled_rows(curated, spool, read)
            write(out, curated, distill_page, prompts, lambda folder: write_sft_rows(folder, rows))
            _print_longest(curated.manifest_extra["longest_row"])


def rewrite(
    distilled: Annotated[Path, typer.Option("--from", help="Folder that `distill` has left.")],
    out: Out,
    record: Record = None,
    verified: Verified = None,
    exclude: Exclude = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it asks for at most; ask nobody.")
    ] = False,
) -> None:
    """Rewrite the thoughts of distilled rows with a model; their actions stay unchanged."""
    read_paths = [distilled, *(record or ()), *(verified or ())]
    with configured(out, config, set_, overwrite, estimate=estimate, read_paths=read_paths) as cfg:
        from trainer.search.curation.distill.rewrite import (
            Distilled,
            estimated,
            make_rewritten,
            rewrite_page,
            rewritten_rows,
        )
        from trainer.search.curation.distill.spool import row_spool, write_sft_rows
        from trainer.search.curation.prior_decisions import read_decided
        from trainer.search.curation.reanswer import kept_answers

        decisions, digests = read_decided(record or (), verified or (), exclude or ())
        source = Distilled(distilled, decisions)
        if estimate:
            typer.echo("\n".join(estimated(source, cfg.rewrite)))
            return
        with row_spool() as spool:
            curated = make_rewritten(source, cfg, kept_answers(cfg, out), out, spool)
            curated.inputs = {**curated.inputs, **digests}
            rows = rewritten_rows(curated, spool, source)
            write(out, curated, rewrite_page, (), lambda folder: write_sft_rows(folder, rows))
            _print_longest(curated.manifest_extra["longest_row"])


def _print_longest(ids: int) -> None:
    if ids:
        typer.echo(f"the longest row has {ids} ids: trainer sft --max_length {ids}")
