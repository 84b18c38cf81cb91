"""`python -m demo.search.loop`: rounds of training, each on data that the previous one improved."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit, run_app


def main(
    run_dir: Annotated[Path, typer.Option(help="Folder for index, logs and rounds.")] = Path(
        "runs/demo-loop"
    ),
    updates: Annotated[
        int | None, typer.Option(min=1, help="Of each training; default: the configs'.")
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Learn of every so many of the demo's questions.")
    ] = 5,
    error: Annotated[
        float, typer.Option(min=0, max=1, help="Share of wrong answers of the verifier.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of planted errors, verifier and trainings.")] = 1,
) -> None:
    """Play three rounds on questions of which some have wrong references. A second start
    continues.
    """
    from demo.search.loop.run import run_demo

    with clean_exit(stopped="stopped; started again, it goes on", stdout="log"):
        run_demo(run_dir, updates=updates, every=every, error=error, seed=seed)


if __name__ == "__main__":
    run_app(lambda: typer.run(main))
