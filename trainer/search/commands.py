"""The commands train, evaluate, check and report for the search task."""

from __future__ import annotations

from pathlib import Path

import typer

from scorekit.errors import UserError
from trainer.runs.launch import read_on_all
from trainer.search.config import SearchConfig
from trainer.search.config import SearchConfig as Config


def train(cfg: SearchConfig, *, resume: bool) -> int:
    """Train the policy and evaluate it before, during and after training."""
    from trainer.search.data import load_held_out, load_train

    questions, held_out = read_on_all(cfg.misc, lambda: (load_train(cfg), load_held_out(cfg)))
    from trainer.runs.results import comparison_table, print_results
    from trainer.search.evaluation.report import write_report
    from trainer.search.evaluation.stats import table
    from trainer.search.training.train import run_search

    artifacts = run_search(questions, held_out, cfg, resume=resume)
    return print_results(
        artifacts,
        cfg.best_by,
        lambda before, after: comparison_table(table(), before.stats(), after.stats()),
        write_report,
    )


def evaluate(cfg: SearchConfig, against: str | None, *, overwrite: bool) -> int:
    """Let the policy search for the held-out questions and score its episodes.

    Exit code 3: a set has no episode with a reward.
    """
    from trainer.search.data import load_held_out

    sets = load_held_out(cfg)
    if not sets:
        raise UserError("data.eval: not set. Give a file of held-out questions.")
    from trainer.runs.results import print_evaluation
    from trainer.search.evaluation.run import run_evaluation
    from trainer.search.evaluation.stats import table

    unscored = []
    for result in run_evaluation(cfg, sets, against, overwrite=overwrite):
        if len(sets) > 1:
            typer.echo(f"set: {result.name}")
        print_evaluation(result, table(), "all questions", left_out="document ")
        if not result.evaluation.stats["reward_coverage"]:
            unscored.append(result.name)
    if unscored:
        typer.echo(f"no episode has a reward: {', '.join(unscored)}", err=True)
    return 3 if unscored else 0


def check(cfg: SearchConfig, processes: int) -> int:
    """Check all that a training run needs, before weights are loaded."""
    from scorekit.report.findings import print_check_results
    from trainer.search.check import check_run

    return print_check_results(check_run(cfg, processes))


def reward(cfg: SearchConfig) -> int:
    """Print the section `reward` with all weights, and the services that answer and judge."""
    from trainer.runs.results import print_reward

    words = [
        "The reward of an episode: w_judge * score + w_ndcg * NDCG + w_format * well-formed (0 or",
        "1). It is no definition; these are sections of a config.",
    ]
    if cfg.reward.gate:
        words.append("gate: an episode that is not well-formed earns 0, and is not judged.")
    data = {"reward": cfg.reward.model_dump(mode="json")}
    if cfg.reward.w_judge:
        answering = cfg.answering
        data["answering"] = {
            "generator": {"base_url": answering.generator.base_url}
            | {"model": answering.generator.model},
            "judge": {"url": answering.judge.url, "model": answering.judge.model},
        }
    print_reward(words, data)
    return 0


def report(run_dir: Path) -> int:
    """Write report.html of a run, which may be unfinished."""
    from trainer.search.evaluation.report import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


__all__ = ["Config", "check", "evaluate", "report", "train"]
