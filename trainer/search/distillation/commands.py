"""The commands `scorekit search distill|rewrite`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trainer.search.curation.command_line import CurationOptions, curation_command


@curation_command(
    *("run", "out", "record", "verified", "exclude", "config", "set_", "overwrite"),
)
def distill(options: CurationOptions) -> None:
    """Turn the rare right episodes of prompts that mostly fail into rows for `scorekit sft`."""
    from trainer.search.curation.disk_spool import DiskSpool
    from trainer.search.distillation.choose import EpisodeText, add_text

    texts = DiskSpool(EpisodeText)
    with options.curating(visit=partial(add_text, texts)) as (cfg, prompts, read):
        from trainer.search.distillation.distill import distill_page, make_distilled
        from trainer.search.distillation.spool import RowSpool, kept_rows, write_sft_rows
        from trainer.search.trajectories.store import FOLDER, TrajectoryStore

        decided = options.prior_decisions(prompts)
        spool = RowSpool()
        curated = make_distilled(prompts, texts, read, cfg, spool, decided)
        stores = {run.name: TrajectoryStore(run.folder / FOLDER) for run in read}
        rows = kept_rows(curated, spool, lambda row: stores[row["run"]].read_image)
        options.write(curated, distill_page, prompts, partial(write_sft_rows, rows=rows))
        _print_longest(curated.manifest_extra["longest_row"])


@curation_command(
    *("distilled", "out", "record", "verified", "exclude", "config", "set_", "overwrite"),
    "estimate",
)
def rewrite(
    options: CurationOptions,
    distilled: Annotated[Path, typer.Option("--from", help="Folder that `distill` has left.")],
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it asks for at most; ask nobody.")
    ] = False,
) -> None:
    """Rewrite the thoughts of distilled rows with a model; their actions stay unchanged."""
    with options.configured(distilled) as cfg:
        from trainer.search.curation.reanswer import kept_answers
        from trainer.search.distillation.rewrite import (
            Distilled,
            estimated,
            make_rewritten,
            rewrite_page,
        )
        from trainer.search.distillation.spool import RowSpool, kept_rows, write_sft_rows

        decided = options.prior_decisions(None)
        source = Distilled(distilled, decided.record)
        if estimate:
            typer.echo("\n".join(estimated(source, cfg.rewrite)))
            return
        spool, answers = RowSpool(), kept_answers(cfg, options.out)
        curated = make_rewritten(source, cfg, answers, options.out, spool)
        curated.inputs = {**curated.inputs, **decided.inputs}
        rows = kept_rows(curated, spool, lambda row: source.read_image)
        options.write(curated, rewrite_page, (), partial(write_sft_rows, rows=rows))
        _print_longest(curated.manifest_extra["longest_row"])


def _print_longest(ids: int) -> None:
    if ids:
        typer.echo(f"the longest row has {ids} ids: scorekit sft --max_length {ids}")
