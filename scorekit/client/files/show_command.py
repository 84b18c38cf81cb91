"""The command `scorekit show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scorekit.client.files.scored_file import Direction, ScoredFile
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.report.worst import WorstRows, print_worst, write_worst_page

_Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="What `scorekit score` wrote; - is stdin.")
]
_Worst = Annotated[int, typer.Option(min=1, help="Rows to show, the worst first.")]
_Metric = Annotated[str | None, typer.Option(help="Metric of OUT; default: its first.")]
_Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page, and print its name alone.")
]
_Input = Annotated[
    Path | None,
    typer.Option("--input", metavar="IN", help="The file that was scored, if OUT has no texts."),
]
_Better = Annotated[
    Direction | None, typer.Option(help="Which scores are better, if OUT does not tell.")
]


def show(
    out: _Out,
    worst: _Worst = 20,
    metric: _Metric = None,
    html: _Html = None,
    source: _Input = None,
    better: _Better = None,
) -> None:
    """Show the rows of a scored file with the worst scores, and their errors marked.

    Rows without a score are named, and are none of the worst.
    """
    with clean_exit():
        inputs = [path for path in (out, source) if path is not None and path.exists()]
        if html is not None and html.exists() and any(map(html.samefile, inputs)):
            raise UserError(f"--html {html}: is a file that is read. Name another")
        file = ScoredFile(out, better)
        name = file.metric(metric)
        is_higher = file.scored_by[name].require_direction(name, str(file.path))
        rows = WorstRows(worst, name, higher_is_better=is_higher)
        for row in file.rows():
            rows.add(row)
        chosen = file.with_texts(rows.rows(), source)
        if html is None:
            from rich.console import Console

            print_worst(Console(), rows, chosen)
        else:
            typer.echo(write_worst_page(html, file.path.name, rows, chosen))
