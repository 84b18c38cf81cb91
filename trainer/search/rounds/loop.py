"""Run the rounds one after the other, and continue an earlier start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scorekit.documents import read_json
from trainer.runs.shutdown import ShutdownHandler
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.search.rounds.page import write_page
from trainer.search.rounds.plan import ANSWERS, LoopPlan, LoopState, check_plan
from trainer.search.rounds.steps import Steps, lock_loop
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.step import Step
from trainer.search.steps.table import step

#: The reason if a loop ends before its last round.
NOTHING_LEFT = "no row is left to play"


def run_loop(cfg: RoundsConfig, out: Path) -> str | None:
    """Run all rounds into the folder `out`; return why the loop ended early, else None.

    Raises UserError if a config is wrong, a step fails, or a budget is used up. The page is written
    in any case.
    """
    plan = LoopPlan(cfg, out)
    state = check_plan(plan)
    with lock_loop(out) as lock, ShutdownHandler():
        try:
            for round_cfg in cfg.rounds:
                if state.rows is not None and not _rows(Path(state.rows).parent):
                    return NOTHING_LEFT
                _run_round(plan, round_cfg, state, lock)
        finally:
            write_page(plan)
    return None


def _run_round(plan: LoopPlan, round_cfg: RoundConfig, state: LoopState, lock: int) -> None:
    """Run one round and update the state."""
    training, folder = plan.training(round_cfg, state), plan.folder(round_cfg)
    curation = plan.curation(round_cfg, state)
    answers_path = training.answering.answers or folder / "train" / ANSWERS
    paid = [str(answers_path), str(curation.answers or plan.out / ANSWERS)]
    steps = Steps(folder, round_cfg.limits, list(dict.fromkeys(paid)), lock, plan.cfg.launch)
    state.runs.append(steps.train(training))
    state.policy = str(steps.export("policy", state.runs[-1]))
    write_page(plan)
    if round_cfg.then:
        _follow(plan, round_cfg, state, steps)


def _follow(plan: LoopPlan, round_cfg: RoundConfig, state: LoopState, steps: Steps) -> None:
    """Run the steps after the training, in their order."""
    for name in round_cfg.then:
        if name == "sft":
            _finetune(plan, round_cfg, state, steps)
        else:
            _curate(step(name), plan.curation(round_cfg, state), state, steps)
        write_page(plan)


def _curate(curation_step: Step[Any], cfg: CurationConfig, state: LoopState, steps: Steps) -> None:
    """Run a curation step and update the state."""
    name, needed = curation_step.name, curation_step.needs
    if needed is not None and not _rows(steps.folder / needed):
        steps.skip(name, f"{needed} has no rows")
        return
    curation_step.in_loop(cfg, state.policy)
    folder = steps.curate(name, cfg, *_input_options(curation_step, cfg, state, steps))
    state.update(curation_step.moves, folder)


def _input_options(
    curation_step: Step[Any], cfg: CurationConfig, state: LoopState, steps: Steps
) -> Iterator[object]:
    """Yield the options of a step that name its inputs; steps.json records their order."""
    options = curation_step.options
    if {"run", "some_runs"} & set(options):
        for run in state.runs:
            yield from ("--run", run)
    if curation_step.needs is not None:
        yield from ("--from", steps.folder / curation_step.needs)
    if "buckets" in options and state.buckets:
        yield from ("--buckets", state.buckets)
    if state.focused and curation_step.takes_rows(cfg):
        yield from ("--rows", state.focused)
    if "record" in options and state.record:
        yield from ("--record", state.record)


def _finetune(plan: LoopPlan, round_cfg: RoundConfig, state: LoopState, steps: Steps) -> None:
    """Fine-tune the trained policy on the distilled rows."""
    chosen = steps.folder / ("rewrite" if "rewrite" in round_cfg.then else "distill")
    if not _rows(steps.folder / "distill") or not _rows(chosen):
        steps.skip("sft", "no rows to train on")
        return
    longest = _manifest(chosen)["longest_row"]
    rows = chosen / "rows.jsonl"
    cfg = plan.finetuning(round_cfg, state.policy, rows, longest, state.record)
    run = steps.finetune(cfg)
    state.policy = str(steps.export("sft-policy", run))


def _rows(folder: Path) -> int:
    """Return the number of rows that a command kept."""
    return int(_manifest(folder)["counts"]["kept"])


def _manifest(folder: Path) -> Any:
    return read_json(folder / "manifest.json")
