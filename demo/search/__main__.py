"""`python -m demo.search`: PDFs to an index, a question turn by turn, a searcher that learns."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit, run_app


def main(
    run_dir: Annotated[Path, typer.Option(help="Folder for index, logs and runs.")] = Path(
        "runs/demo-search"
    ),
    updates: Annotated[
        int | None, typer.Option(min=1, help="Of each phase; default: the configs'.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Of the held-out questions; default: all.")
    ] = None,
) -> None:
    """Teach a small policy to find evidence in the demo's slides; see what it earns."""
    from demo.common import STOPPED
    from demo.search.run import run_demo

    with clean_exit(stopped=STOPPED, stdout="log"):
        run_demo(run_dir, updates=updates, limit=limit)


if __name__ == "__main__":
    run_app(lambda: typer.run(main))
