"""Command-line functions of best-of-n SFT."""

from __future__ import annotations

from pathlib import Path

import typer

from trainer.translation import commands as translation
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.best_of_n.config import BestOfNConfig as Config


def train(cfg: BestOfNConfig, *, resume: bool) -> int:
    """Sample and score, choose, train, and evaluate before and after."""
    from trainer.translation.data import load_held_out, load_train

    view = cfg.translation
    train_examples, sets = load_train(view), load_held_out(view)
    from trainer.runs.results import print_evaluation
    from trainer.translation.best_of_n.run import run_best_of_n
    from trainer.translation.evaluation.stats import table

    result = run_best_of_n(cfg, train_examples, sets, resume=resume)
    if result.stopped is not None:
        typer.echo(f"stopped: {result.stopped}", err=True)
        return result.exit_code
    for outcome in result.outcomes:
        if len(result.outcomes) > 1:
            typer.echo(f"set: {outcome.name}")
        print_evaluation(outcome, table(outcome.evaluation.stats), "all sources")
    counts = result.selection
    typer.echo(f"rows: {counts['rows']}, {counts['pairs']} of them pairs")
    if counts.get("reward_of_chosen") is not None:
        typer.echo(
            f"reward of the chosen translations: {counts['reward_of_chosen']:.3f}, of all samples: "
            f"{counts['reward_of_samples']:.3f}"
        )
    typer.echo(f"policy: {result.checkpoint}")
    return 0


def evaluate(cfg: BestOfNConfig, against: str | None, *, overwrite: bool) -> int:
    """Translate the held-out examples with the policy and score them."""
    return translation.evaluate(cfg.translation, against, overwrite=overwrite)


def headroom(
    cfg: BestOfNConfig, name: str | None, *, samples: int, reverse: str | None, overwrite: bool
) -> int:
    """Print what there is to gain by the reward, before any training."""
    return translation.headroom(
        cfg.translation, name, samples=samples, reverse=reverse, overwrite=overwrite
    )


def check(cfg: BestOfNConfig, processes: int) -> int:
    """Check everything that a run needs, before any weights are loaded."""
    from scorekit.report.findings import print_check_results
    from trainer.translation.best_of_n.check import check_run

    return print_check_results(check_run(cfg, processes))


def reward(cfg: BestOfNConfig) -> int:
    """Print the reward as a definition."""
    return translation.reward(cfg.translation)


def report(run_dir: Path) -> int:
    """Write the page of the run's training."""
    from trainer.sft.stats import write_report

    typer.echo(f"report: {write_report(run_dir / 'sft')}")
    return 0


__all__ = ["Config", "check", "evaluate", "headroom", "report", "reward", "train"]
