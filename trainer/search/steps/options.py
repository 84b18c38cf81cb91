"""The options of the curation commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]


@dataclass(frozen=True, kw_only=True)
class CurationOptions:
    """The options of the curation commands. A command has those that its step names.

    run: where runs are required.
    some_runs: the same option where runs are optional.
    further: options of the step alone.
    """

    out: Annotated[Path, typer.Option("--out", help="Folder of what is made; a new one.")]
    run: Annotated[
        list[Path],
        typer.Option("--run", help="Folder of a run; several: in the order of the rounds."),
    ] = field(default_factory=list)
    some_runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Folder of a run, whose config and questions are taken, too."),
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(help="Folder of one of these commands (`focus`): the rows that it kept."),
    ] = None
    record: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of `search diagnose`, `hallucinations` or `verify`, or its record.jsonl: "
            "what they decided holds here, too; several."
        ),
    ] = None
    verified: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of `search verify`: what it dropped is left out; several."),
    ] = None
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Text file of rows to leave out: an id a line, a tab, why; several."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Of these commands (YAML); without it, defaults."),
    ] = None
    set_: Overrides = None
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Calls, tokens and money at most; nobody is asked."),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what such a command has left in --out.")
    ] = False

    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[Path]:
        """Return the folders of the runs."""
        return [*self.run, *(self.some_runs or ())]

    @property
    def inputs(self) -> list[Path]:
        """Return the files and folders of other steps that are read."""
        more = [value for value in self.further.values() if isinstance(value, Path)]
        rows = [self.rows] if self.rows else []
        return [*more, *rows, *(self.verified or ()), *(self.record or ())]
