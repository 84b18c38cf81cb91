"""scorekit synth check|run|status|estimate: the stages of a synthesis run."""

from __future__ import annotations

import sys

from scorekit.interrupts import end_at_once

if __name__ == "__main__" or sys.argv[0].endswith("synth_parallel"):
    end_at_once()  # at Ctrl-C during the imports below

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scorekit.command import StdoutContent, clean_exit, run_app
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.processes import usable_cpus
from scorekit.streams import stop_waiting

if TYPE_CHECKING:  # `--help` works without the extra
    from synth.config import SynthConfig
    from synth.run import RunOptions

app = typer.Typer(
    help="Synthetic parallel data from MADLAD-400, a teacher and MetricX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

DRY_RUN_SOURCES = 100
MAX_DRY_RUN_SOURCES = 1000

ConfigFile = Annotated[Path, typer.Option("--config", help="The run's config (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]
EvaluationSets = Annotated[
    list[Path] | None,
    typer.Option(help="Leave out what stands in this evaluation set (data.decontaminate)."),
]


@app.command()
def run(
    context: typer.Context,
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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --overwrite.")] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Reject what a service still does not answer.")
    ] = False,
    repair: Annotated[
        int | None, typer.Option(min=0, help="Make this shard of the stage again, and go on.")
    ] = None,
    decontaminate: EvaluationSets = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many records at most.")] = None,
    shard_id: Annotated[int, typer.Option(min=0, help="This machine's number.")] = 0,
    num_shards: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    engine: Annotated[
        str, typer.Option(help="local, or ray: the shards as tasks of a Ray cluster.")
    ] = "local",
    processes: Annotated[
        int,
        typer.Option(min=0, help="Processes of this machine that share the work; 0: one a core."),
    ] = 1,
) -> None:
    """Run one stage, or all of them."""
    with _clean_exit(
        how_to_resume(context.find_root().info_name or "", sys.argv[1:]), stdout="log"
    ):
        cfg = _load(config, set_)
        cfg.data.decontaminate += map(str, decontaminate or [])
        from synth.config import pair_configs
        from synth.pairs import run_pairs
        from synth.run import RunOptions
        from synth.stages.table import stage_names

        if dry_run:
            limit = limit or DRY_RUN_SOURCES
        options = RunOptions(
            stages=stage_names(stage),
            dry_run=dry_run,
            resume=resume or repair is not None,
            overwrite=overwrite,
            limit=limit,
            shard_id=shard_id,
            num_shards=num_shards,
            engine=engine,
            give_up=give_up,
            processes=processes or usable_cpus(),
            repair=repair,
        )
        _check(options, stage)
        if overwrite and not yes:
            for pair_cfg in pair_configs(cfg).values():
                _ask_before_overwrite(pair_cfg, options)
        if dataset := run_pairs(cfg, options):
            typer.echo(f"dataset of all pairs: {dataset}", err=True)


@app.command()
def check(
    config: ConfigFile,
    stage: Annotated[str, typer.Option(help="One of the stages, or all.")] = "all",
    set_: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="As for run --overwrite: of finished stages, too.")
    ] = False,
    decontaminate: EvaluationSets = None,
    limit: Annotated[int | None, typer.Option(min=1, help="As for run --limit.")] = None,
    engine: Annotated[str, typer.Option(help="As for run: local, or ray.")] = "local",
) -> None:
    """Check what a run, or run --resume, depends on: config, folder, corpus, services. Nothing is
    written. The teacher is asked for one token, a judge for one verdict."""
    with _clean_exit():
        cfg = _load(config, set_)
        cfg.data.decontaminate += map(str, decontaminate or [])
        from scorekit.report.findings import print_check_results
        from synth.preflight import check_run
        from synth.run import RunOptions
        from synth.stages.table import stage_names

        options = RunOptions(
            stage_names(stage),
            resume=not overwrite,
            overwrite=overwrite,
            limit=limit,
            engine=engine,
        )
        _check(options, stage)
        raise typer.Exit(print_check_results(check_run(cfg, options)))


@app.command()
def status(config: ConfigFile, set_: Overrides = None) -> None:
    """Stages, shards, counts, rates and the time left."""
    with _clean_exit():
        from rich.console import Console

        from synth.report.estimate import status as status_table

        cfg = _load(config, set_)
        for pair_cfg in _existing_pairs(cfg).values():
            Console().print(status_table(pair_cfg.run.out_dir))


@app.command()
def estimate(
    config: ConfigFile,
    set_: Overrides = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(min=0.1, help="Output tokens a second of the teacher.")
    ] = None,
    scores_per_s: Annotated[
        float | None, typer.Option(min=0.1, help="Translations a second of MetricX, all of them.")
    ] = None,
    verdicts_per_s: Annotated[
        float | None, typer.Option(min=0.1, help="Translations a second of the judge.")
    ] = None,
) -> None:
    """Estimate requests, tokens, hours and disk before anything is spent. Rates that are not given
    come from a finished stage of the run, or of its dry run."""
    with _clean_exit():
        from rich.console import Console

        from synth.config import pair_configs
        from synth.report.estimate import Rates
        from synth.report.estimate import estimate as estimate_table

        cfg = _load(config, set_)
        rates = Rates(tokens_per_s, scores_per_s, verdicts_per_s)
        for name, pair_cfg in pair_configs(cfg).items():
            Console().print(*filter(None, [name]), estimate_table(pair_cfg, rates), crop=False)


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="A stage or a view, such as rejected.")],
    config: ConfigFile,
    set_: Overrides = None,
) -> None:
    """Print the records of a stage or a view, a line of JSON each."""
    with _clean_exit():
        from synth.report.views import shown_records
        from synth.storage.store import to_line

        cfg = _load(config, set_)
        for pair_cfg in _existing_pairs(cfg).values():
            for record in shown_records(pair_cfg.run.out_dir, what):
                sys.stdout.buffer.write(to_line(record))


@app.command()
def push(
    config: ConfigFile,
    repo_id: Annotated[str, typer.Option(help="Dataset on the hub: USER/NAME.")],
    set_: Overrides = None,
    private: Annotated[bool, typer.Option("--private", help="Nobody else may see it.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also a dry run, or a run under --limit.")
    ] = False,
) -> None:
    """Upload the export to the Hugging Face hub (HF_TOKEN), in one commit."""
    with _clean_exit(stdout="log"):
        from synth.export.push import push as push_export

        cfg = _load(config, set_)
        typer.echo(push_export(cfg, repo_id, private=private, partial=partial))


@app.command()
def repair(config: ConfigFile, set_: Overrides = None) -> None:
    """Check all shards for damage, and repair the file of cached answers."""
    with _clean_exit(stdout="log"):
        from synth.repair import repair as repair_run

        cfg = _load(config, set_)
        for name, pair_cfg in _existing_pairs(cfg).items():
            for line in repair_run(pair_cfg):
                typer.echo(f"{name}: {line}" if name else line)


def _load(config: Path, overrides: list[str] | None) -> SynthConfig:
    from synth.config import SynthConfig

    return load_config(SynthConfig, config, overrides)


def _existing_pairs(cfg: SynthConfig) -> dict[str, SynthConfig]:
    """Return the configs of the pairs with an existing folder, by name; all if there is none."""
    from synth.config import pair_configs

    configs = pair_configs(cfg)
    return {
        name: pair_cfg for name, pair_cfg in configs.items() if pair_cfg.run.out_dir.exists()
    } or configs


def _check(options: RunOptions, stage: str) -> None:
    """Raise UserError for options that do not fit together."""
    if options.engine not in ("local", "ray"):
        raise UserError(f"--engine {options.engine}: give local or ray")
    if options.engine == "ray" and options.processes != 1:
        raise UserError("--processes: of this machine; --engine ray takes those of the cluster")
    odd = stage == "all" or options.overwrite or options.dry_run
    if options.repair is not None and odd:
        raise UserError("--repair: with one --stage, and without --overwrite and --dry-run")
    if options.resume and options.overwrite:
        raise UserError("--resume, --overwrite: give one of them")
    if options.shard_id >= options.num_shards:
        raise UserError(
            f"--shard-id {options.shard_id}: less than --num-shards {options.num_shards}"
        )
    if options.dry_run and (options.limit or 0) > MAX_DRY_RUN_SOURCES:
        raise UserError(f"--limit {options.limit}: a dry run takes {MAX_DRY_RUN_SOURCES} at most")


def _ask_before_overwrite(cfg: SynthConfig, options: RunOptions) -> None:
    """Ask before records are deleted. Raises UserError if there is no terminal to ask on."""
    from synth.config import answers_place
    from synth.run import run_folder
    from synth.stages.table import BY_NAME
    from synth.storage.stats import funnel

    names = list(BY_NAME)
    cleared = names[names.index(options.stages[0]) :]
    try:
        counts = funnel(cleared, run_folder(cfg, options))
        if not any(c.done for c in counts):
            return
        deleted = ", ".join(f"{c.stage} {c.records_out:,}" for c in counts)
    except UserError:  # damaged stages have no counts, and --overwrite repairs them
        deleted = ", ".join(cleared)
    answers_location = answers_place(cfg)
    cost_note = "paid answers are kept"
    if "://" not in answers_location and not Path(answers_location).exists():
        cost_note = f"there are no answers in {answers_location}: everything is paid for again"
    message = f"--overwrite deletes the records of {deleted} ({cost_note})"
    if not sys.stdin.isatty():
        raise UserError(f"{message}: add --yes, or use --resume instead")
    if not typer.confirm(f"{message}. Go on?", err=True):
        raise UserError("nothing was changed")


@contextmanager
def _clean_exit(go_on: str = "", *, stdout: StdoutContent = "result") -> Iterator[None]:
    """Handle errors as `clean_exit`, and SIGTERM like Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    with clean_exit(go_on, stopped="interrupted", stdout=stdout):
        yield


def how_to_resume(program: str, arguments: list[str]) -> str:
    """Return the same command with --resume.

    program: its name before the arguments. All other options stay: without --dry-run, --limit or
    --set it would be another run."""
    options = [part for part in arguments if part not in ("--overwrite", "--resume", "--yes")]
    return f"{program} {shlex.join(options)} --resume"


def _interrupt(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C, even if SIGINT is ignored (`command &` in a script)."""
    stop_waiting()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    """Run the command `synth_parallel`."""
    run_app(app)


if __name__ == "__main__":
    main()
