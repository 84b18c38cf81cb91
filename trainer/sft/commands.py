"""Command-line functions of the SFT task."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from scorekit.errors import UserError
from trainer.sft.config import SftConfig
from trainer.sft.config import SftConfig as Config


def train(cfg: SftConfig, *, resume: bool) -> int:
    """Train on the rows, and measure the loss on held-out ones before, between and after."""
    from trainer.runs.config import DEFAULT_EVAL_SET
    from trainer.runs.results import comparison_table, print_results
    from trainer.sft.report import write_report
    from trainer.sft.run import run_sft
    from trainer.sft.stats import TABLE

    artifacts = run_sft(cfg, resume=resume)
    return print_results(
        artifacts,
        DEFAULT_EVAL_SET,
        lambda before, after: comparison_table(TABLE, before, after),
        write_report,
    )


def evaluate(cfg: SftConfig, against: str | None, *, overwrite: bool) -> int:
    """Raise UserError: what a model writes is evaluated by the task that it is for."""
    raise UserError(
        "SFT writes its loss on data.eval to eval.jsonl. To compare what models write, evaluate "
        "them with their task (scorekit evaluate --config configs/roleplay/...)"
    )


def check(cfg: SftConfig, processes: int) -> int:
    """Check rows, template and options, before any weights are loaded."""
    return debug(cfg, processes, memory=True)


def reward(cfg: SftConfig) -> int:
    """Raise UserError: supervised training has no reward."""
    raise UserError("task: sft: it learns from given answers, and has no reward")


def report(run_dir: Path) -> int:
    """Write the page of a run, finished or not."""
    from trainer.sft.report import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


def debug(cfg: SftConfig, processes: int = 1, *, memory: bool = False) -> int:
    """Print the labels of the rows, the findings of the template check and the sizes of an update
    of so many processes; 2 if the check fails.

    memory: also print what each process needs.
    """
    import torch

    from trainer.rl.policy import check_4bit, check_adapters
    from trainer.sft.debug import print_label_masks
    from trainer.sft.prepare import load_held_out, load_train
    from trainer.sft.run import open_tokenizer, update_text
    from trainer.sft.trainer import sft_arguments

    check_4bit(cfg.policy)
    tokenizer = open_tokenizer(cfg)
    check_adapters(cfg.policy, trl=True)
    train, held_out = load_train(cfg, tokenizer), load_held_out(cfg, tokenizer)
    print_label_masks(Console(), tokenizer, train)
    sft_arguments(cfg, torch.device("cpu"))
    typer.echo(update_text(cfg, len(train.rows), processes))
    if memory:
        typer.echo(f"memory: {_memory(cfg, max(len(row.ids) for row in train.rows), processes)}")
    findings = [*train.findings, *held_out.findings]
    has_errors = any(not finding.ok for finding in findings)
    return 2 if has_errors and cfg.sft.template_check == "refuse" else 0


def _memory(cfg: SftConfig, longest: int, processes: int) -> str:
    """Return what each process needs. longest: tokens of the longest row. Raises UserError."""
    from trainer.runs.checks import check_device, check_model
    from trainer.runs.memory import estimate_trl_memory, memory_text

    device, _ = check_device(cfg.misc)
    model, _ = check_model(cfg.policy, cfg.policy.path, "policy.path", trl=True)
    length = cfg.data.max_length if cfg.sft.packing and cfg.data.max_length else longest
    tokens = cfg.sft.per_device_train_batch_size * length
    unsharded, sharded = (
        estimate_trl_memory(cfg, model, tokens, shards=shards) for shards in (1, processes)
    )
    return memory_text(unsharded, sharded, device, processes)


__all__ = ["Config", "check", "debug", "evaluate", "report", "train"]
