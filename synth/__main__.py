"""synth_parallel run|status|estimate: the stages of a synthesis run."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from scorekit.config import load_config
from scorekit.errors import ScorekitError, UserError
from synth.config import SynthConfig

app = typer.Typer(
    help="Synthetic parallel data from MADLAD-400, a teacher and MetricX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

#: The stages in their order. `score_128_select_best` is another name of score_select_best.
STAGES = (
    "sample_sources", "prefilter_score", "select_sources", "generate_128", "score_select_best",
    "format_filter", "export",
)  # fmt: skip
_ALIASES = {"score_128_select_best": "score_select_best"}
DRY_RUN_SOURCES = 100
MOST_DRY_RUN_SOURCES = 1000

ConfigFile = Annotated[Path, typer.Option("--config", help="The run's config (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]


@app.command()
def run(
    config: ConfigFile,
    stage: Annotated[str, typer.Option(help="One of the stages, or all.")],
    set_: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="100 sources (or --limit), in a folder of its own.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is there.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew; later stages are cleared too.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many records at most.")] = None,
    shard_id: Annotated[int, typer.Option(min=0, help="This machine's number.")] = 0,
    num_shards: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    engine: Annotated[
        str, typer.Option(help="local, or ray: the shards as tasks of a Ray cluster.")
    ] = "local",
) -> None:
    """Run one stage, or all of them."""
    with _clean_exit(how_to_resume(sys.argv[1:])):
        cfg = load_config(SynthConfig, config, set_)
        from synth.run import RunOptions, run_stages

        stage = _ALIASES.get(stage, stage)
        if stage != "all" and stage not in STAGES:
            raise UserError(f"--stage {stage}: give all, or one of {', '.join(STAGES)}")
        if engine not in ("local", "ray"):
            raise UserError(f"--engine {engine}: give local or ray")
        if resume and overwrite:
            raise UserError("--resume, --overwrite: give one of them")
        if shard_id >= num_shards:
            raise UserError(f"--shard-id {shard_id}: less than --num-shards {num_shards}")
        if dry_run:
            limit = limit or DRY_RUN_SOURCES
            if limit > MOST_DRY_RUN_SOURCES:
                raise UserError(f"--limit {limit}: a dry run takes {MOST_DRY_RUN_SOURCES} at most")
        options = RunOptions(
            stages=STAGES if stage == "all" else (stage,),
            dry_run=dry_run, resume=resume, overwrite=overwrite, limit=limit,
            shard_id=shard_id, num_shards=num_shards, engine=engine,
        )  # fmt: skip
        run_stages(cfg, options)


@app.command()
def status(config: ConfigFile, set_: Overrides = None) -> None:
    """Stages, shards, counts, rates and the time left."""
    with _clean_exit():
        from rich.console import Console

        from synth.estimate import status as status_table

        cfg = load_config(SynthConfig, config, set_)
        Console().print(status_table(cfg.run.out_dir))


@app.command()
def estimate(
    config: ConfigFile,
    set_: Overrides = None,
    tokens_per_s: Annotated[
        float, typer.Option(min=1.0, help="Output tokens a second of the teacher.")
    ] = 7500.0,
) -> None:
    """Requests, tokens, hours and disk from the config alone, before anything is spent."""
    with _clean_exit():
        from rich.console import Console

        from synth.estimate import estimate as estimate_table

        cfg = load_config(SynthConfig, config, set_)
        Console().print(estimate_table(cfg, tokens_per_s=tokens_per_s))


@contextmanager
def _clean_exit(how_to_resume: str = "") -> Iterator[None]:
    """A user's mistake: one line and exit code 2. Ctrl-C: how to go on, and 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except ScorekitError as error:
        typer.echo(f"error: {error}; what is done is kept: {how_to_resume}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: {how_to_resume}", err=True)
        sys.exit(130)


def how_to_resume(given: list[str]) -> str:
    """The same command with --resume. A part of it would do something else: without --dry-run the
    whole run, without --limit or --set another one."""
    kept = [part for part in given if part not in ("--overwrite", "--resume")]
    return f"python -m synth {shlex.join(kept)} --resume"


def _interrupt(*_: object) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    """The command `synth_parallel`."""
    app()


if __name__ == "__main__":
    main()
