"""The command `scorekit search import`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scorekit.command import clean_exit
from scorekit.report.render import visible


class Dataset(StrEnum):
    """The datasets that can be imported."""

    SLIDEVQA = "slidevqa"
    VIDOSEEK = "vidoseek"
    MMLONGBENCH = "mmlongbench"
    VIDORE_V3 = "vidore_v3"


def import_dataset(
    dataset: Annotated[Dataset, typer.Argument(help="The dataset.")],
    source: Annotated[
        Path, typer.Argument(help="Folder of the downloaded dataset, or its file of questions.")
    ],
    out: Annotated[Path, typer.Option(help="New folder for questions and page files.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Import this split; several may be. Default: all.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of its page files, or zip file of its PDFs; default: in SOURCE."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="vidore_v3: of the questions (english, ...); default: all.")
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-out", help="Leave out, and count, what cannot be used; default: refuse all."
        ),
    ] = False,
    keep_unanswerable: Annotated[
        bool,
        typer.Option(
            "--keep-unanswerable", help="mmlongbench: keep questions that have no answer."
        ),
    ] = False,
) -> None:
    """Import a published dataset from files on this machine: questions, gold pages, page files.

    It is written completely or not at all; after a stop, start it again.
    """
    with clean_exit(stopped="stopped: nothing was written"):
        from trainer.search.importers.published import ImportOptions
        from trainer.search.importers.run import run_import

        options = ImportOptions(source, images, tuple(split or ()), language)
        imported = run_import(
            dataset.value, options, out, leave_out=leave_out, keep_unanswerable=keep_unanswerable
        )
        for line in imported.lines():
            typer.echo(visible(line))
