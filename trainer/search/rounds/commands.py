"""The command `scorekit search loop`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit
from scorekit.config import load_config
from trainer.search.steps.options import Overrides


def loop(
    config: Annotated[Path, typer.Option("--rounds", help="The rounds (YAML).")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the loop; goes on with its own.")],
    set_: Overrides = None,
) -> None:
    """Run rounds of training, curation and SFT. The same command continues a stopped loop.

    Exit code: that of a failed step. 143, 130: SIGTERM or Ctrl-C, which are passed to the running
    step: a training writes a checkpoint.
    """
    from trainer.runs.messages import show_messages

    with clean_exit(f"the same command (--out {out})", stdout="log"):
        show_messages()
        from rich.console import Console
        from rich.table import Column, Table

        from trainer.search.rounds.config import RoundsConfig
        from trainer.search.rounds.loop import run_loop
        from trainer.search.rounds.page import PAGE, rounds_of
        from trainer.search.rounds.plan import LoopPlan
        from trainer.search.rounds.summary import rounds_table

        cfg = load_config(RoundsConfig, config, list(set_ or []))
        stop_reason = run_loop(cfg, out)
        head, lines = rounds_table(cfg, rounds_of(LoopPlan(cfg, out)))
        summary = Table("", *(Column(name, justify="right") for name in head[1:]))
        for line in lines:
            summary.add_row(*line)
        Console().print(summary)
        if stop_reason:
            typer.echo(f"ended: {stop_reason}")
        typer.echo(f"page: {out / PAGE}")
