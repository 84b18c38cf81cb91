"""Print, run commands in processes of their own, and read evaluations, for all demos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from scorekit.errors import UserError
from testing.processes import run_module
from trainer.runs.run_log import read_jsonl

ROOT = Path(__file__).parents[1]
DATA, MODELS = ROOT / "demo/data", ROOT / "demo/models"
#: The message of a demo that a signal ends.
STOPPED = "stopped; every process that the demo started has ended"
#: Threads of a trainer. The services wait while it updates, so two cores are free for it; a machine
#: with more takes no more, since the digits may depend on the number.
TRAINER_THREADS = 2

console = Console(highlight=False)


def print_step(step: str, text: str) -> None:
    """Print the title of a step."""
    console.print(f"\n[bold cyan]{step}[/]  [bold]{text}[/]")


def set_flags(values: Mapping[str, object]) -> list[str]:
    """Return `--set` flags for the values that are not None."""
    present = ((key, value) for key, value in values.items() if value is not None)
    return [part for key, value in present for part in ("--set", f"{key}={value}")]


def run_checked(*args: str, env: Mapping[str, str] | None = None) -> None:
    """Run `python -m ARGS` as a user would, in a process of its own.

    Raise UserError if it fails.
    """
    if code := run_module(*args, env=env):
        raise UserError(f"python -m {' '.join(args)} ended with exit code {code}")


def read_evaluation(
    folder: Path, *, first: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the stats of the evaluation in a folder, and its lines.

    For a training run, read the last one, or the first.
    """
    alone = folder / "evaluation.jsonl"
    if alone.is_file():
        return json.loads((folder / "evaluation.json").read_text("utf-8")), read_jsonl(alone)
    stats = read_jsonl(folder / "eval.jsonl")[0 if first else -1]
    return stats, read_jsonl(folder / stats["completions"])
