"""scorekit train|evaluate|check --config FILE [--set section.key=value];
export RUN_DIR --to FOLDER; report RUN_DIR; roleplay prepare ...; search ask|collect|...;
template-check --model M --data D; sft --config FILE [--debug_label_mask --debug_only]"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from scorekit.command import StdoutContent, clean_exit, run_app
from scorekit.config import check_config, read_config
from scorekit.errors import UserError
from trainer.chat import cli as chat
from trainer.roleplay.cli import app as roleplay
from trainer.runs.messages import show_messages
from trainer.search.cli import app as search
from trainer.sft import commands as finetuning
from trainer.tasks import Commands, commands_of, commands_of_run

app = typer.Typer(
    help="Train a model with rewards of scoring services; the config names its task.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(roleplay, name="roleplay")
app.add_typer(search, name="search")

ConfigFile = Annotated[Path, typer.Option("--config", help="The run's config (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Read this many training and held-out examples at most.")
]


@contextmanager
def _clean_exit(stdout: StdoutContent = "log") -> Iterator[None]:
    """Print messages of libraries; an error is one line and an exit code."""
    with clean_exit(stopped="stopped (resume a training run with --resume)", stdout=stdout):
        show_messages()
        yield


@app.command()
def train(
    config: ConfigFile,
    set_: Overrides = None,
    limit: Limit = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in misc.run_dir.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every stat of an update (misc.verbose).")
    ] = False,
) -> None:
    """Train the policy; evaluate it before, between and after.

    Exit code 1: a rule of the config's section `stop` ended the run. 3: the services gave no reward
    (stop.skipped_updates). 143, 130: SIGTERM or Ctrl-C ended it, after an update and with its
    checkpoint; a second signal ends it at once. --resume continues in each case.
    """
    verbose_override = ["misc.verbose=true"] if verbose else []
    with _clean_exit():
        commands, cfg = _load(config, [*(set_ or []), *verbose_override], limit)
        raise typer.Exit(commands.train(cfg, resume=resume))


@app.command()
def evaluate(
    config: ConfigFile,
    set_: Overrides = None,
    limit: Limit = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this policy (folder or hub id; of a searcher also URL#MODEL), or "
            "with an earlier evaluation (the folder that holds its evaluation.jsonl)."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an evaluation in misc.run_dir.")
    ] = False,
) -> None:
    """Run the policy on the held-out examples, and score the results."""
    with _clean_exit():
        commands, cfg = _load(config, set_, limit)
        raise typer.Exit(commands.evaluate(cfg, against, overwrite=overwrite))


@app.command()
def headroom(
    config: ConfigFile,
    set_: Overrides = None,
    limit: Limit = None,
    set_name: Annotated[
        str | None,
        typer.Option("--set-name", help="The held-out set; default: the first (data.eval)."),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Samples of each source.")] = 16,
    reverse: Annotated[
        str | None,
        typer.Option(
            help="A policy that translates back (folder or hub id): also choose by how likely the "
            "source is after a translation."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Forget an earlier measurement in misc.run_dir.")
    ] = False,
) -> None:
    """Tell before training what there is to gain: how good the best of n samples is.

    Of a translation policy: greedy, the mean sample, and the best by the reward, by
    log-probability, by MBR and by the reference. A stopped command goes on with its samples and
    scores.
    """
    with _clean_exit():
        commands, cfg = _load(config, set_, limit)
        measure = getattr(commands, "headroom", None)
        if measure is None:
            raise UserError(f"{config}: task: only translation policies have a headroom command")
        raise typer.Exit(
            measure(cfg, set_name, samples=samples, reverse=reverse, overwrite=overwrite)
        )


@app.command()
def check(
    config: ConfigFile,
    set_: Overrides = None,
    limit: Limit = None,
    processes: Annotated[
        int,
        typer.Option(min=1, envvar="WORLD_SIZE", help="Processes that are to share the run."),
    ] = 1,
) -> None:
    """Check everything that a training run needs, before any weights are loaded."""
    with _clean_exit("result"):
        commands, cfg = _load(config, set_, limit)
        raise typer.Exit(commands.check(cfg, processes))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run (misc.run_dir).")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must not exist.")],
    best: Annotated[
        bool, typer.Option("--best/--last", help="The best checkpoint by evaluation, or the last.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type of the written weights.")
    ] = "float32",
) -> None:
    """Write a checkpoint as a plain Hugging Face folder, adapters merged."""
    with _clean_exit():
        from trainer.runs.checkpoints.checkpoint import read_state
        from trainer.runs.checkpoints.export import export_policy

        checkpoint = export_policy(run_dir, to, best=best, dtype=dtype)
        rating = f", best by reward_mean of {read_state(checkpoint).rated_by}" if best else ""
        size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
        typer.echo(f"policy: {to} ({checkpoint.name}{rating}, {dtype}, {size / 2**20:.1f} MiB)")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run (misc.run_dir).")],
) -> None:
    """Write report.html of a run, finished or not."""
    with _clean_exit():
        raise typer.Exit(commands_of_run(run_dir).report(run_dir))


@app.command()
def reward(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Folder of a run (misc.run_dir); or give --config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A config, in place of a run's (YAML).")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Print the reward of a run or config: its parts, weights and services, as YAML to paste.

    Of a translation run it is a reward definition, which other trainers take. Nothing is asked."""
    with _clean_exit("result"):
        if (run_dir is None) == (config is None):
            raise UserError("reward: give the folder of a run, or --config FILE")
        if run_dir is not None:
            commands_of_run(run_dir)
        commands, cfg = _load(config or (run_dir or Path()) / "config.yaml", set_, None)
        raise typer.Exit(commands.reward(cfg))


app.command("template-check")(_clean_exit("result")(chat.template_check))
app.command()(_clean_exit()(finetuning.sft))


def _new_path(config: Path) -> Path:
    """Return the new path of a shipped config that is named by its path of version 0.1.

    Other paths are returned unchanged.
    """
    if config.parent.parts[-2:] != ("configs", "trainer") or config.exists():
        return config
    new_path = config.parent.with_name("translation") / config.name
    if not new_path.exists():
        return config
    typer.echo(f"{config} has moved. Use {new_path}; version 0.3 drops the old path", err=True)
    return new_path


def _load(config: Path, overrides: list[str] | None, limit: int | None) -> tuple[Commands, Any]:
    """Return the commands of the config's task, and the config."""
    limits = [] if limit is None else [f"data.train_limit={limit}", f"eval.eval_limit={limit}"]
    path = _new_path(config)
    data = read_config(path, [*(overrides or []), *limits])
    commands = commands_of(data, path)
    return commands, check_config(commands.Config, data, path)


if __name__ == "__main__":
    run_app(app)
