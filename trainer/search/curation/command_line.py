"""The shared options, start and output of the curation commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from scorekit.command import clean_exit
from scorekit.config import load_config

if TYPE_CHECKING:
    from trainer.search.curation.config import CurationConfig
    from trainer.search.curation.dataset import CurationResult
    from trainer.search.curation.prior_decisions import PriorDecisions
    from trainer.search.curation.samples import CuratedPrompt, CuratedRun, Visit

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]


@dataclass(frozen=True, kw_only=True)
class CurationOptions:
    """The shared options of the curation commands. A command has those that it names.

    run: required; some_runs: the same option where runs are optional.
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

    @property
    def runs(self) -> list[Path]:
        """Return the folders of the runs."""
        return [*self.run, *(self.some_runs or ())]

    @contextmanager
    def configured(self, *inputs: Path) -> Iterator[CurationConfig]:
        """Load and check the config and the output folder. inputs: further folders that are read.

        With `estimate`, nothing will be written, so the folder is not checked.
        """
        from trainer.runs.messages import show_messages

        with clean_exit(stdout="result" if self.estimate else "log"):
            show_messages()
            from trainer.search.curation.config import CurationConfig
            from trainer.search.curation.dataset import check_out

            cfg = load_config(CurationConfig, self.config, list(self.set_ or []))
            if not self.estimate:
                rows = [self.rows] if self.rows else []
                read_paths = [*inputs, *rows, *(self.verified or ()), *(self.record or ())]
                check_out(self.out, overwrite=self.overwrite, inputs=read_paths)
            yield cfg

    @contextmanager
    def curating(
        self, *inputs: Path, visit: Visit | None = None
    ) -> Iterator[tuple[CurationConfig, list[CuratedPrompt], list[CuratedRun]]]:
        """Load the config and the episodes. visit: is called with each episode."""
        with self.configured(*inputs) as cfg:
            from trainer.search.curation.samples import read_prompts

            yield cfg, *read_prompts(self.runs, cfg, visit)

    def prior_decisions(
        self, prompts: Sequence[CuratedPrompt] | None, buckets: Path | None = None
    ) -> PriorDecisions:
        """Return the decisions in the folders and files of the options.

        prompts: of the data; None: any. buckets: folder of `search buckets`.
        """
        from trainer.search.curation.prior_decisions import read_known

        ids = None if prompts is None else {prompt.question.id for prompt in prompts}
        return read_known(ids, buckets, self.verified or (), self.exclude or (), self.record or ())

    def write(
        self,
        result: CurationResult,
        page: Callable[[CurationResult, Any], str],
        prompts: Sequence[CuratedPrompt],
        fill: Callable[[Path], None] | None = None,
        more: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write a result and its page, and print the counts. fill, more: as in `write_curated`."""
        from trainer.search.curation.dataset import write_curated

        prompts_by_id = {prompt.question.id: prompt for prompt in prompts}
        write_curated(self.out, result, page(result, prompts_by_id), fill, more)
        counts = result.manifest()["counts"]
        for reason, count in counts["reasons"].items():
            typer.echo(f"{count:7}  {reason}")
        typer.echo(f"kept: {counts['kept']} of {counts['rows']} rows in {self.out / 'rows.jsonl'}")
        typer.echo(f"page: {self.out / 'report.html'}")


def curation_command(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function of `CurationOptions` and options of its own.

    names: all its options, in the order of its `--help`. An option of its own that has the name of
    a shared one goes to both; its help counts.
    """
    shared = _shared_parameters()

    def make_command(function: Callable[..., None]) -> Callable[..., None]:
        _, *specific_parameters = signature(function, eval_str=True).parameters.values()
        specific = {parameter.name: parameter for parameter in specific_parameters}

        def command(**values: Any) -> None:
            shared_values = {name: value for name, value in values.items() if name in shared}
            other_values = {name: value for name, value in values.items() if name in specific}
            function(CurationOptions(**shared_values), **other_values)

        parameters = [(specific.get(name) or shared[name]).replace(kind=_BY_NAME) for name in names]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        vars(command)["__signature__"] = Signature(parameters)  # typer makes options of it
        return command

    return make_command


_BY_NAME = Parameter.KEYWORD_ONLY


def _shared_parameters() -> dict[str, Parameter]:
    """Return the fields of `CurationOptions` as parameters; without a default they are required."""
    hints = get_type_hints(CurationOptions, include_extras=True)
    return {
        item.name: Parameter(
            item.name,
            _BY_NAME,
            default=Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(CurationOptions)
    }
