"""Command-line functions of the role-play task."""

from __future__ import annotations

from pathlib import Path

import typer

from scorekit.errors import UserError
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.config import RoleplayConfig as Config


def train(cfg: RoleplayConfig, *, resume: bool) -> int:
    """Train the policy; evaluate it before, between and after."""
    from trainer.roleplay.evaluation.report import write_report
    from trainer.roleplay.evaluation.stats import table
    from trainer.roleplay.training.run import run_roleplay
    from trainer.runs.config import DEFAULT_EVAL_SET
    from trainer.runs.results import comparison_table, print_results

    artifacts = run_roleplay(cfg, resume=resume)
    return print_results(
        artifacts,
        DEFAULT_EVAL_SET,
        lambda before, after: comparison_table(table(), before, after),
        write_report,
    )


def evaluate(cfg: RoleplayConfig, against: str | None, *, overwrite: bool) -> int:
    """Answer the held-out turns with the policy and score the replies."""
    if cfg.data.eval is None:
        raise UserError("data.eval: required. Set the turns to answer")
    from trainer.roleplay.evaluation.evaluate import open_tokenizer
    from trainer.roleplay.evaluation.run import run_evaluation
    from trainer.roleplay.evaluation.stats import table
    from trainer.roleplay.similarity import embedder_of
    from trainer.roleplay.training.check import held_out_turns
    from trainer.runs.results import print_evaluation

    tokenizer = open_tokenizer(cfg)
    outcome = run_evaluation(
        cfg,
        held_out_turns(cfg, tokenizer),
        tokenizer,
        lambda folder: embedder_of(cfg.reward, folder / "embedder.log"),
        against,
        overwrite=overwrite,
    )
    print_evaluation(outcome, table(), "")
    return 0


def check(cfg: RoleplayConfig, processes: int) -> int:
    """Check everything that a training run needs, before any weights are loaded."""
    from scorekit.report.findings import print_check_results
    from trainer.roleplay.training.check import check_run

    return print_check_results(check_run(cfg, processes))


def reward(cfg: RoleplayConfig) -> int:
    """Print the section `reward` with the weights of all functions."""
    import yaml

    from trainer.roleplay.rules import definition_of
    from trainer.runs.results import print_reward

    definition = definition_of(cfg.reward)
    words = [
        "The reward of a reply: the sum of weight * value of five functions (0 to 1 each) of",
        "trainer.roleplay.rewards. This is the section of a config. For other trainers, as a",
        "definition whose samples have the rows' columns (trainer/roleplay/rules.py):",
        *(f"  {line}" for line in yaml.safe_dump(definition, sort_keys=False).splitlines()),
    ]
    section = cfg.reward.model_dump(mode="json")
    weights = {name: part["weight"] for name, part in definition["components"].items()}
    print_reward(words, {"reward": section | {"weights": weights}})
    return 0


def report(run_dir: Path) -> int:
    """Write report.html of a run, finished or not."""
    from trainer.roleplay.evaluation.report import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


__all__ = ["Config", "check", "evaluate", "report", "train"]
