"""`python -m demo`: start both services, score, train against them, compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from scorekit.errors import ScorekitError


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
    from demo.run import run_demo

    try:
        run_demo(run_dir, updates=updates, limit=limit)
    except (ScorekitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("stopped; every process that the demo started has ended", file=sys.stderr)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
