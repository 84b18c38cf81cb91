"""`scorekit init`: write a config for data of the user's, with the keys to change marked."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from scorekit.command import clean_exit
from scorekit.errors import UserError


class _Task(NamedTuple):
    """A task: the package and folder of its `own.yaml`, and the commands that take a config."""

    package: str
    folder: str
    commands: tuple[str, ...]


_TRAINING = ("check --config {}", "train --config {}")
#: The packages are named, not imported: they need extras.
TASKS = {
    "translation": _Task("trainer", "translation", _TRAINING),
    "roleplay": _Task("trainer", "roleplay", _TRAINING),
    "search": _Task("trainer", "search", _TRAINING),
    "synth": _Task("synth", ".", ("synth check --config {}", "synth run --config {} --stage all")),
}
#: The mark of a line that the user has to change.
CHANGE = "# CHANGE: "
#: What a config calls itself in its comments.
_NAME = "my.yaml"


def init(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.", show_default=False)],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The config to write (YAML).")],
) -> None:
    """Write a config for your data, with three keys to change; it runs without a GPU or a hub."""
    with clean_exit():
        if task not in TASKS:
            raise UserError(f"{task}: no such task. Choose from {', '.join(TASKS)}")
        chosen, name = TASKS[task], shlex.quote(str(path))
        source = files(chosen.package) / chosen.folder / "own.yaml"
        text = source.read_text(encoding="utf-8").replace(_NAME, name)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{path}: there is a file already. Choose another name") from None
        typer.echo(f"{path}: change these lines")
        for number, line in enumerate(text.splitlines(), 1):
            if CHANGE in line:
                typer.echo(f"  {number}: {' '.join(line.replace(CHANGE, '# ').split())}")
        typer.echo("then run")
        for command in chosen.commands:
            typer.echo(f"  scorekit {command.format(name)}")
