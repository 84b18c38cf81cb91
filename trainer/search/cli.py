"""The commands `scorekit search loop|import|ask|collect|estimate|view|salvage|export`.

The commands of curation and `serve-openenv` are added here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from scorekit.command import StdoutContent, clean_exit
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.lazy_commands import lazy_group
from scorekit.report.render import visible
from trainer.search.environment.openenv_command import serve_openenv
from trainer.search.steps.commands import entries

app = typer.Typer(
    cls=lazy_group(entries()),
    help="Search: episodes of a policy that looks for evidence in document pages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="The run's config (YAML); without it, defaults.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="A model's folder or hub id (policy.path), or the URL of an OpenAI-compatible server "
        "with /v1 (server.url).",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The model's name at that server (server.model).")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Read this many questions at most.")]
RunDir = Annotated[Path, typer.Argument(help="Folder of a run.")]
Steps = Annotated[
    list[int] | None, typer.Option(help="Of this step; several may be. Default: all.")
]


@app.command()
def loop(
    config: Annotated[Path, typer.Option("--rounds", help="The rounds (YAML).")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the loop; goes on with its own.")],
    set_: Overrides = None,
) -> None:
    """Run rounds of training, curation and SFT. The same command continues a stopped loop.

    Exit code: that of a failed step. 143, 130: SIGTERM or Ctrl-C, which are passed to the running
    step: a training writes a checkpoint.
    """
    from trainer.runs.messages import show_messages

    with clean_exit(f"the same command (--out {out})", stdout="log"):
        show_messages()
        from rich.table import Column, Table

        from trainer.search.rounds.config import RoundsConfig
        from trainer.search.rounds.loop import run_loop
        from trainer.search.rounds.page import PAGE, rounds_of
        from trainer.search.rounds.plan import LoopPlan
        from trainer.search.rounds.summary import rounds_table

        cfg = load_config(RoundsConfig, config, list(set_ or []))
        stop_reason = run_loop(cfg, out)
        head, lines = rounds_table(cfg, rounds_of(LoopPlan(cfg, out)))
        summary = Table("", *(Column(name, justify="right") for name in head[1:]))
        for line in lines:
            summary.add_row(*line)
        Console().print(summary)
        if stop_reason:
            typer.echo(f"ended: {stop_reason}")
        typer.echo(f"page: {out / PAGE}")


app.command()(serve_openenv)


class Dataset(StrEnum):
    """The datasets that can be imported."""

    SLIDEVQA = "slidevqa"
    VIDOSEEK = "vidoseek"
    MMLONGBENCH = "mmlongbench"
    VIDORE_V3 = "vidore_v3"


@app.command("import")
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


@app.command()
def ask(
    question: Annotated[str, typer.Option("--question", help="What the pages are to tell.")],
    policy: PolicyName = None,
    model: ModelName = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    reference: Annotated[
        str, typer.Option(help="The right answer, for the judge; without it nobody judges.")
    ] = "",
    gold: Annotated[
        list[str] | None, typer.Option(help="Id of a page that has it, for NDCG; several may be.")
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer/--no-answer", help="Ask the generator at the end.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="New folder; default: one in runs/ask, by the time.")
    ] = None,
) -> None:
    """Let a policy search for the evidence of one question, and print each turn."""
    with _clean_exit():
        from trainer.search.ask import ask as ask_one
        from trainer.search.ask import reward_of_one
        from trainer.search.records import Question, Trajectory
        from trainer.search.trajectories.show import end_panel, question_panel, turn_panel
        from trainer.search.trajectories.view import write_view

        if not question.strip():
            raise UserError("--question: the text is empty")
        folder = out or Path("runs/ask") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        cfg = _config(config, policy, model, [*(set_ or []), f"misc.run_dir={folder}"])
        cfg.reward = reward_of_one(cfg.reward, answer=answer, gold=bool(gold))
        asked_question = Question(
            id="asked", question=question, reference_answer=reference, gold=tuple(gold or ())
        )
        console, num_printed = Console(), 0
        console.print(question_panel(asked_question))

        def print_new_turns(trajectory: Trajectory) -> None:
            nonlocal num_printed
            for turn in trajectory.turns[num_printed:]:
                console.print(turn_panel(turn, asked_question.gold))
            num_printed = len(trajectory.turns)

        final = ask_one(cfg, asked_question, folder, on_turn=print_new_turns)
        console.print(end_panel(final))
        typer.echo(f"page: {write_view(folder)}")
        if final.end == "failed":
            raise typer.Exit(3)


@app.command()
def collect(
    config: ConfigFile = None,
    policy: PolicyName = None,
    model: ModelName = None,
    set_: Overrides = None,
    limit: Limit = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in misc.run_dir.")
    ] = False,
) -> None:
    """Let a policy search for every question of data.train; store the episodes and their rewards.

    Exit code 3: no episode has a reward. 143, 130: SIGTERM or Ctrl-C ended it after a step.
    """
    with _clean_exit():
        from trainer.runs.results import report_table
        from trainer.search.collect import collect as collect_all
        from trainer.search.evaluation.stats import table
        from trainer.search.trajectories.view import write_view

        done = collect_all(_config(config, policy, model, set_), resume=resume, limit=limit)
        Console().print(report_table(table(), done.stats))
        typer.echo(f"trajectories: {done.folder / 'trajectories'}")
        typer.echo(f"page: {write_view(done.folder)}")
        if done.stopped:
            typer.echo(f"stopped: {done.stopped}", err=True)
        raise typer.Exit(done.exit_code)


@app.command()
def estimate(
    run_dir: Annotated[
        Path, typer.Argument(help="Folder of a run of a few episodes (collect --limit).")
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Of the run to come.")],
    set_: Overrides = None,
) -> None:
    """Estimate the paid calls of a run from a few episodes, without calling a server."""
    with _clean_exit("result"):
        from trainer.search.answer.estimate import estimate as compute_estimate
        from trainer.search.config import SearchConfig
        from trainer.search.trajectories.store import FOLDER, TrajectoryStore

        cfg = load_config(SearchConfig, run_dir / "config.yaml", list(set_ or []))
        sample = list(TrajectoryStore(run_dir / FOLDER).read())
        for line in compute_estimate(sample, episodes, cfg.answering).lines():
            typer.echo(line)


@app.command()
def view(
    run_dir: RunDir,
    step: Steps = None,
    most: Annotated[
        int, typer.Option(min=1, help="Episodes on the page, as many of each step as of another.")
    ] = 200,
) -> None:
    """Write the page of a run's trajectories."""
    with _clean_exit():
        from trainer.search.trajectories.view import write_view

        typer.echo(f"page: {write_view(run_dir, steps=step, max_episodes=most)}")


@app.command()
def salvage(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run, or a file of paid answers.")],
) -> None:
    """Repair what a run has stored: keep what can be read of damaged step files and paid answers.

    The damaged files are kept beside the new ones.
    """
    with _clean_exit():
        from scorekit.paid.repair import repaired_lines
        from trainer.search.trajectories.salvage import salvage as salvage_store

        answers = run_dir if run_dir.is_file() else run_dir / "answers.sqlite"
        lines = []
        if not run_dir.is_file():
            steps = salvage_store(run_dir)
            lines = [line for step in steps for line in step.lines()]
            lines = lines or [f"{run_dir}: no line is damaged"]
        if answers.is_file():
            lines += repaired_lines(answers)
        for line in lines:
            typer.echo(visible(line))


@app.command()
def export(
    run_dir: RunDir,
    target: Annotated[Path, typer.Argument(help="New folder.")],
    form: Annotated[
        Literal["sft", "atif", "inspect"],
        typer.Option(
            "--format",
            help="sft: rows for `scorekit sft`. atif, inspect: examples/export_trajectories.py "
            "writes them.",
        ),
    ],
    step: Steps = None,
    model: Annotated[
        str | None,
        typer.Option(help="sft: the model that is to learn (policy.path); default: the run's."),
    ] = None,
    ended: Annotated[
        Literal["complete", "any"],
        typer.Option(
            help="sft: episodes whose policy ended the search; any: also those that were cut short "
            "or given up, without a forced end."
        ),
    ] = "complete",
    least_reward: Annotated[
        float | None, typer.Option(help="sft: of an episode; default: any, also none.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Export a run's trajectories, with their images, for training."""
    with _clean_exit():
        if form != "sft":
            raise UserError(
                f"--format {form}: not written by this command. Run `python "
                f"examples/export_trajectories.py {run_dir} {target} --format {form}`."
            )
        from trainer.search.steps.sft_rows import ROWS, export_sft

        model_overrides = [
            "policy.tokenizer=null",
            "policy.revision=null",
            f"policy.path={model}",
        ]
        overrides = [*(model_overrides if model is not None else []), *(set_ or [])]
        cfg = _config(run_dir / "config.yaml", None, None, overrides)
        result = export_sft(
            run_dir, target, cfg, steps=step, end_filter=ended, min_reward=least_reward
        )
        typer.echo("\n".join([f"episodes: {result.rows} in {target / ROWS}", *result.lines()]))


def _config(
    path: Path | None, policy: str | None, model: str | None, overrides: list[str] | None
) -> Any:
    from trainer.search.config import SearchConfig

    all_overrides = list(overrides or [])
    if policy is not None:
        key = "server.url" if policy.startswith(("http://", "https://")) else "policy.path"
        all_overrides += [f"{key}={policy}"]
        all_overrides += ["server.url=null"] if key == "policy.path" else []
    if model is not None:
        all_overrides.append(f"server.model={model}")
    return load_config(SearchConfig, path, all_overrides)


@contextmanager
def _clean_exit(stdout: StdoutContent = "log") -> Iterator[None]:
    from trainer.runs.messages import show_messages

    with clean_exit(stdout=stdout):
        show_messages()
        yield
