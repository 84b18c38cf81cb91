"""The shared options, start and output of the curation commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scorekit.command import clean_exit
from scorekit.config import load_config

if TYPE_CHECKING:
    from trainer.search.curation.config import CurationConfig
    from trainer.search.curation.dataset import CurationResult
    from trainer.search.curation.samples import CuratedPrompt, CuratedRun, Visit

Runs = Annotated[
    list[Path], typer.Option("--run", help="Folder of a run; several: in the order of the rounds.")
]
SomeRuns = Annotated[
    list[Path] | None,
    typer.Option("--run", help="Folder of a run, whose config and questions are taken, too."),
]
EstimateOnly = Annotated[
    bool, typer.Option("--estimate", help="Calls, tokens and money at most; nobody is asked.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Of these commands (YAML); without it, defaults.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder of what is made; a new one.")]
Rows = Annotated[
    Path | None,
    typer.Option(help="Folder of one of these commands (`focus`): the rows that it kept."),
]
Record = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of `search diagnose`, `hallucinations` or `verify`, or its record.jsonl: what "
        "they decided holds here, too; several."
    ),
]
Verified = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of `search verify`: what it dropped is left out; several."),
]
Exclude = Annotated[
    list[Path] | None,
    typer.Option(help="Text file of rows to leave out: an id a line, a tab, why; several."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what such a command has left in --out.")
]


@contextmanager
def configured(
    out: Path,
    config: Path | None,
    overrides: Sequence[str] | None,
    overwrite: bool,
    *,
    estimate: bool = False,
    read_paths: Sequence[Path] = (),
) -> Iterator[CurationConfig]:
    """Load and check the config and the output folder of a command.

    estimate: nothing will be written. read_paths: folders that are read.
    """
    from trainer.runs.messages import show_messages

    with clean_exit():
        show_messages()
        from trainer.search.curation.config import CurationConfig
        from trainer.search.curation.dataset import check_out

        cfg = load_config(CurationConfig, config, list(overrides or []))
        if not estimate:
            check_out(out, overwrite=overwrite, inputs=read_paths)
        yield cfg


@contextmanager
def curating(
    runs: Sequence[Path],
    out: Path,
    config: Path | None,
    overrides: Sequence[str] | None,
    overwrite: bool,
    *,
    visit: Visit | None = None,
    estimate: bool = False,
    read_paths: Sequence[Path] = (),
) -> Iterator[tuple[CurationConfig, list[CuratedPrompt], list[CuratedRun]]]:
    """Load the config and the episodes. visit: is called with each episode."""
    with configured(
        out, config, overrides, overwrite, estimate=estimate, read_paths=read_paths
    ) as cfg:
        from trainer.search.curation.samples import read_prompts

        yield cfg, *read_prompts(runs, cfg, visit)


def write(
    out: Path,
    result: CurationResult,
    page: Callable[[CurationResult, Any], str],
    prompts: Sequence[CuratedPrompt],
    fill: Callable[[Path], None] | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a result and its page, and print the counts.

    fill: writes the rows into the folder if they do not fit in memory. more: further files, name ->
    content.
    """
    from trainer.search.curation.dataset import write_curated

    write_curated(
        out, result, page(result, {prompt.question.id: prompt for prompt in prompts}), fill, more
    )
    counts = result.manifest()["counts"]
    for reason, count in counts["reasons"].items():
        typer.echo(f"{count:7}  {reason}")
    typer.echo(f"kept: {counts['kept']} of {counts['rows']} rows in {out / 'rows.jsonl'}")
    typer.echo(f"page: {out / 'report.html'}")
