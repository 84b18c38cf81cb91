"""`python -m demo`: start both services, score, train against them, compare."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit, run_app


def main(
    run_dir: Annotated[Path, typer.Option(help="Folder for logs, caches and report.")] = Path(
        "runs/demo"
    ),
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates of the policy; default: the config's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=8, help="Held-out sources; default: the config's.")
    ] = None,
) -> None:
    """Score real translations, train the small policy by PPO against the services, compare."""
    from demo.common import STOPPED
    from demo.run import run_demo

    with clean_exit(stopped=STOPPED, stdout="log"):
        run_demo(run_dir, updates=updates, limit=limit)


if __name__ == "__main__":
    run_app(lambda: typer.run(main))
