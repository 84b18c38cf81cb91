"""python -m trainer search distill|rewrite: right episodes as rows to learn from."""

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
    """Put the commands beside the others of `search`."""
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
    """The rare right episodes of prompts that mostly fail, as rows for `trainer sft`."""
    from trainer.search.curation.distil.choose import Wrote

    wrote, beside = Wrote(), [*(record or ()), *(verified or ())]
    with curating(run, out, config, set_, overwrite, visit=wrote.visit, read_paths=beside) as (
        cfg,
        prompts,
        read,
    ):
        from trainer.search.curation.distil.distill import (
            distill_page,
            distilled_rows,
            make_distilled,
        )
        from trainer.search.curation.distil.spool import row_spool, write_sft_rows
        from trainer.search.curation.known import read_known

        known = read_known(prompts, None, verified or (), exclude or (), record or ())
        with row_spool() as spool:
            made = make_distilled(prompts, wrote.of, read, cfg, spool, known)
            rows = distilled_rows(made, spool, read)
            write(out, made, distill_page, prompts, lambda folder: write_sft_rows(folder, rows))
            _say_longest(made.told["longest_row"])


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
    """The thoughts of distilled rows in better words, by a model; their actions stay."""
    beside = [distilled, *(record or ()), *(verified or ())]
    with configured(out, config, set_, overwrite, estimate=estimate, read_paths=beside) as cfg:
        from trainer.search.curation.asking import kept_answers
        from trainer.search.curation.distil.rewrite import (
            Distilled,
            estimated,
            make_rewritten,
            rewrite_page,
            rewritten_rows,
        )
        from trainer.search.curation.distil.spool import row_spool, write_sft_rows
        from trainer.search.curation.known import read_decided

        decisions, digests = read_decided(record or (), verified or (), exclude or ())
        before = Distilled(distilled, decisions)
        if estimate:
            typer.echo("\n".join(estimated(before, cfg.rewrite)))
            return
        with row_spool() as spool:
            made = make_rewritten(before, cfg, kept_answers(cfg, out), out, spool)
            made.inputs = {**made.inputs, **digests}
            rows = rewritten_rows(made, spool, before)
            write(out, made, rewrite_page, (), lambda folder: write_sft_rows(folder, rows))
            _say_longest(made.told["longest_row"])


def _say_longest(ids: int) -> None:
    if ids:
        typer.echo(f"the longest row has {ids} ids: trainer sft --max_length {ids}")
