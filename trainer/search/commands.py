"""The verbs of the command line for a searcher: what they say, and how they end."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from scorekit.errors import UserError
from trainer.search.config import SearchConfig
from trainer.search.config import SearchConfig as Config


def train(cfg: SearchConfig, *, resume: bool) -> int:
    """Train the policy; evaluate it before, between and after."""
    from trainer.runs.verbs.tables import comparison_table
    from trainer.search.data import load_held_out, load_train

    questions, held_out = load_train(cfg), load_held_out(cfg)
    from trainer.search.evaluation.figures import table
    from trainer.search.evaluation.report import write_report
    from trainer.search.training.train import run_search

    artifacts = run_search(questions, held_out, cfg, resume=resume)
    if not artifacts.is_main:
        return 0  # torchrun ends all with the first that fails, and the main one has yet to tell
    for name, reports in artifacts.sets.items():
        if not reports:  # it was asked to leave before the first
            continue
        if len(artifacts.sets) > 1:
            best = " (the best checkpoint is chosen by it)" if name == cfg.best_by else ""
            typer.echo(f"set: {name}{best}")
        before, after = reports[0][1], reports[-1][1]
        Console().print(comparison_table(table(), before.figures(), after.figures()))
    if artifacts.updates or any(artifacts.sets.values()):
        typer.echo(f"report: {write_report(artifacts.run_dir)}")
    return artifacts.say_end()


def evaluate(cfg: SearchConfig, against: str | None, *, overwrite: bool) -> int:
    """Let the policy search for the held-out questions, and score what it finds.

    Exit code 3: no episode of a set has a reward.
    """
    from trainer.search.data import load_held_out

    sets = load_held_out(cfg)
    if not sets:
        raise UserError("data.eval is not set: give the questions to search for")
    from trainer.runs.verbs.tables import paired_table, report_table
    from trainer.search.evaluation.figures import table
    from trainer.search.evaluation.run import run_evaluation

    unscored = []
    for of in run_evaluation(cfg, sets, against, overwrite=overwrite):
        if len(sets) > 1:
            typer.echo(f"set: {of.name}")
        Console().print(report_table(table(), of.evaluation.figures))
        typer.echo(f"report: {of.page}")
        if not of.evaluation.figures["reward_coverage"]:
            unscored.append(of.name)
        if of.earlier is None or of.groups is None:
            continue
        typer.echo(f"A: {of.earlier.policy}\nB: {of.evaluation.policy}")
        for name, figures in of.groups.items():
            if not name.startswith("document "):  # there may be many: they stand on the page
                typer.echo("all questions" if name == "all" else name)
                Console().print(paired_table(figures))
        typer.echo(f"comparison: {of.comparison}")
    if unscored:
        typer.echo(f"no episode has a reward: {', '.join(unscored)}", err=True)
    return 3 if unscored else 0


def check(cfg: SearchConfig) -> int:
    """Look at all that a training run needs, before any weights are loaded."""
    from scorekit.report.findings import say_findings
    from trainer.search.check import check_run

    return say_findings(check_run(cfg))


def report(run_dir: Path) -> int:
    """Write report.html of a run, finished or not."""
    from trainer.search.evaluation.report import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


__all__ = ["Config", "check", "evaluate", "report", "train"]
