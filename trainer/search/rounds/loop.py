"""The rounds, one after the other; each goes on where an earlier start has left it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.runs.leaving import Leaving
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.search.rounds.page import write_page
from trainer.search.rounds.plan import ANSWERS, LoopPlan, Standing, check_plan
from trainer.search.rounds.steps import Steps, held

#: Why a loop ends before its last round.
NOTHING_LEFT = "no row is left to play"


def run_loop(cfg: RoundsConfig, out: Path) -> str | None:
    """All rounds into the folder `out`; why it ended before the last, None where it did not.

    Raises UserError where a config is wrong, a step does not end well, or a budget is used up; the
    page tells of what is done in any case.
    """
    plan = LoopPlan(cfg, out)
    standing = check_plan(plan)
    with held(out) as lock, Leaving():
        try:
            for of in cfg.rounds:
                if standing.rows is not None and not _rows(Path(standing.rows).parent):
                    return NOTHING_LEFT
                _play(plan, of, standing, lock)
        finally:
            write_page(plan)
    return None


def _play(plan: LoopPlan, of: RoundConfig, standing: Standing, lock: int) -> None:
    """One round. standing: becomes what it leaves."""
    training, folder = plan.training(of, standing), plan.folder(of)
    curation = plan.curation(of, standing)
    kept = training.answering.answers or folder / "train" / ANSWERS
    paid = [Path(kept), Path(curation.answers or plan.out / ANSWERS)]
    steps = Steps(folder, of.limits, list(dict.fromkeys(paid)), lock, plan.cfg.launch)
    standing.runs.append(steps.train(training))
    standing.policy = str(steps.export("policy", standing.runs[-1]))
    write_page(plan)
    if of.then:
        _follow(plan, of, standing, steps)


def _follow(plan: LoopPlan, of: RoundConfig, standing: Standing, steps: Steps) -> None:
    """What comes behind the training, in its order."""
    runs = [flag for run in standing.runs for flag in ("--run", run)]
    for name in of.then:
        cfg: Any = plan.curation(of, standing)
        record: list[Any] = ["--record", standing.record] if standing.record else []
        match name:
            case "alternatives":
                grown = steps.curate(name, cfg, *runs)
                standing.data = {"train": str(grown / "rows.jsonl")}
            case "buckets":
                steps.curate(name, cfg, *runs)
            case "diagnose" | "hallucinations" | "verify":
                standing.record = steps.curate(name, cfg, *runs, *record)
            case "focus":
                more: list[Any] = ["--buckets", steps.folder / "buckets"]
                more = more if "buckets" in of.then else []
                again = standing.focused if "all" in cfg.focus.take else None
                more += ["--rows", again] if again else []
                standing.focused = steps.curate(name, cfg, *runs, *more, *record)
                standing.rows = str(standing.focused / "rows.jsonl")
            case "budget":
                chosen = ["--rows", standing.focused] if standing.focused else []
                budget = steps.curate(name, cfg, *runs, *chosen, *record)
                standing.rows = str(budget / "rows.jsonl")
            case "distill":
                cfg.distill.model = cfg.distill.model or standing.policy
                steps.curate(name, cfg, *runs, *record)
            case "rewrite":
                _rewrite(steps, cfg, record)
            case "sft":
                _finetune(plan, of, standing, steps)
        write_page(plan)


def _rewrite(steps: Steps, cfg: Any, record: Sequence[Any]) -> None:
    distilled = steps.folder / "distill"
    if _rows(distilled):
        steps.curate("rewrite", cfg, "--from", distilled, *record)
    else:
        steps.skip("rewrite", "distill has kept no row")


def _finetune(plan: LoopPlan, of: RoundConfig, standing: Standing, steps: Steps) -> None:
    """What was distilled is learned by the policy that the training left."""
    chosen = steps.folder / ("rewrite" if "rewrite" in of.then else "distill")
    if not _rows(steps.folder / "distill") or not _rows(chosen):
        steps.skip("sft", "no row to learn")
        return
    longest = _manifest(chosen)["longest_row"]
    rows = chosen / "rows.jsonl"
    cfg = plan.finetuning(of, standing.policy, rows, longest, standing.record)
    run = steps.finetune(cfg)
    standing.policy = str(steps.export("sft-policy", run))


def _rows(folder: Path) -> int:
    """That a command has kept."""
    return int(_manifest(folder)["counts"]["kept"])


def _manifest(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return told
