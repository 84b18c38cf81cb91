"""Command-line functions of the translation task."""

from __future__ import annotations

from pathlib import Path

import typer

from scorekit.errors import UserError
from trainer.runs.launch import read_on_all
from trainer.translation.config import TranslationConfig
from trainer.translation.config import TranslationConfig as Config


def train(cfg: TranslationConfig, *, resume: bool) -> int:
    """Train the policy; evaluate it before, between and after."""
    from trainer.translation.data import load_held_out, load_train

    examples, held_out = read_on_all(cfg.misc, lambda: (load_train(cfg), load_held_out(cfg)))
    from trainer.runs.results import print_results
    from trainer.translation.evaluation.evaluate import comparison_table
    from trainer.translation.evaluation.report import write_report
    from trainer.translation.train import train_translation

    artifacts = train_translation(examples, held_out, cfg, resume=resume)
    return print_results(artifacts, cfg.best_by, comparison_table, write_report)


def evaluate(cfg: TranslationConfig, against: str | None, *, overwrite: bool) -> int:
    """Translate the held-out examples with the policy and score them."""
    from trainer.translation.data import load_held_out

    sets = load_held_out(cfg)
    if not sets:
        raise UserError("data.eval: required. Set the examples to translate")
    from trainer.runs.results import print_evaluation
    from trainer.translation.evaluation.run import run_evaluation
    from trainer.translation.evaluation.stats import table

    for outcome in run_evaluation(cfg, sets, against, overwrite=overwrite):
        if len(sets) > 1:
            typer.echo(f"set: {outcome.name}")
        print_evaluation(outcome, table(outcome.evaluation.stats), "all sources")
    return 0


def headroom(
    cfg: TranslationConfig, name: str | None, *, samples: int, reverse: str | None, overwrite: bool
) -> int:
    """Print what there is to gain by the reward, before any training.

    name: of the set.
    """
    from trainer.translation.data import load_set

    sets = list(cfg.data.held_out)
    if not sets:
        raise UserError("data.eval: required. Set the examples to translate")
    name = sets[0] if name is None else name
    if name not in sets:
        raise UserError(f"--set-name: {name!r} is no evaluation set ({', '.join(sets)})")
    examples = load_set(cfg, name)
    from rich.console import Console

    from scorekit.report.render import at_full_width
    from trainer.translation.best_of_n.headroom import in_words
    from trainer.translation.best_of_n.headroom_run import notes, run_headroom

    generation = cfg.generation.model_copy(update={"num_samples_per_prompt": samples})
    cfg = cfg.model_copy(update={"generation": generation})
    files = run_headroom(cfg, name, examples, reverse=reverse, overwrite=overwrite)
    Console().print(at_full_width(files.table), crop=False)
    for note in notes(files.result):
        typer.echo(note)
    typer.echo(f"headroom: {files.json}, {files.page}")
    typer.echo(in_words(files.result))
    return 0


def check(cfg: TranslationConfig, processes: int) -> int:
    """Check everything that a training run needs, before any weights are loaded."""
    from scorekit.report.findings import print_check_results
    from trainer.translation.check import check_run

    return print_check_results(check_run(cfg, processes))


def reward(cfg: TranslationConfig) -> int:
    """Print the reward as a definition, with what a definition cannot say in words."""
    from trainer.runs.results import print_reward
    from trainer.translation.rewards.short_form import definition_of, missing_parts

    definition = definition_of(cfg.reward)
    words = ["The reward of a translation: the sum of weight * (offset + scale * score)."]
    if definition is None:
        words = ["Every weight is 0, or of a part that no definition has."]
    missing = list(missing_parts(cfg.reward))
    if missing:
        words += ["Beside that, our trainer adds what is not part of a definition:"]
        words += [f"  {part}" for part in missing]
    data = {} if definition is None else definition.model_dump(mode="json", exclude_defaults=True)
    print_reward(words, data)
    return 0


def report(run_dir: Path) -> int:
    """Write report.html of a run, finished or not."""
    from trainer.translation.evaluation.report import write_report

    typer.echo(f"report: {write_report(run_dir)}")
    return 0


__all__ = ["Config", "check", "evaluate", "headroom", "report", "reward", "train"]
