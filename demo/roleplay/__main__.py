"""`python -m demo.roleplay`: check the template, train by SFT, train by GRPO, compare."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit, run_app


def main(
    run_dir: Annotated[Path, typer.Option(help="Folder for logs, runs and report.")] = Path(
        "runs/demo-roleplay"
    ),
    sft_steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of SFT; default: the config's.")
    ] = None,
    grpo_steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of GRPO; default: the config's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=4, help="Held-out turns; default: the config's.")
    ] = None,
) -> None:
    """Find the fault of a chat template, mend it, and let five rewards mend the rest."""
    from demo.common import STOPPED
    from demo.roleplay.run import run_demo

    with clean_exit(stopped=STOPPED, stdout="log"):
        run_demo(run_dir, sft_steps=sft_steps, grpo_steps=grpo_steps, limit=limit)


if __name__ == "__main__":
    run_app(lambda: typer.run(main))
