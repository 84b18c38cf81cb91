"""Measure what the five role-play rewards teach: each left out, a control, three seeds.

    python -m evidence.roleplay            # what stands in runs/roleplay_evidence is kept
    python -m evidence.roleplay --only all --only shuffled --seeds 1
    python -m evidence.roleplay --report   # write its page of evidence again

The start is the demo's: its policy after SFT with the mended template. Each run is the demo's GRPO
in a process of its own against the embedder over HTTP, measured on turns that nothing was tuned on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common import RESULTS, WORK, machine, write_json
from evidence.roleplay.arms import (
    ALL,
    ARMS,
    COMMON,
    CONFIG,
    RUNS,
    SEEDS,
    UNSEEN_NAMES,
    names_folder,
    order,
    run_folder,
)
from evidence.seeds import check_arms, run_logged
from scorekit.command import clean_exit
from testing.processes import exit_on_sigterm, running_service

console = Console(stderr=True, highlight=False)


def make_start(folder: Path, embedder: str) -> Path:
    """Make the policy that all runs begin with, as the demo does; an existing one is kept."""
    from demo.roleplay.run import GRPO, POLICY, check_template, run_trainer, train_sft

    policy = folder / "start-policy"
    measured = {"misc.run_dir": folder / "hurt", "reward.embedding_model": embedder, **COMMON}
    if not (folder / "hurt/evaluation.jsonl").is_file():
        run_trainer("evaluate", GRPO, {"policy.path": POLICY, **measured}, "--overwrite")
    if not policy.is_dir():
        template = folder / "chat_template.fixed.jinja"
        check_template(template)
        train_sft(folder / "sft", template, policy, None)
    return policy


def train(name: str, seed: int, folder: Path, settings: dict[str, object]) -> None:
    """Train one run, unless it is on disk with the same settings."""
    arm, run = ARMS[name], run_folder(folder, name, seed)
    chosen = {key: str(value) for key, value in (settings | arm.settings).items()}
    done = folder / f"{run.name}.json"
    own_settings = {key: value for key, value in chosen.items() if key != "reward.embedding_model"}
    if done.is_file() and json.loads(done.read_text())["settings"] == own_settings:
        return
    done.unlink(missing_ok=True)  # of other settings; a run that is broken off does not count
    if name == ALL:
        shutil.rmtree(names_folder(folder, seed), ignore_errors=True)
    console.print(f"[bold]{arm.title}[/], seed {seed}")
    module = "evidence.roleplay.control" if arm.shuffled else "trainer"
    chosen |= {"misc.seed": str(seed), "misc.run_dir": str(run), "misc.overwrite": "true"}
    flags = [f"{key}={value}" for key, value in chosen.items()]
    seconds = run_logged(module, CONFIG, flags, folder / f"{run.name}.log", {})
    done.write_text(json.dumps({"settings": own_settings, "seconds": seconds}), encoding="utf-8")
    console.print(f"  {seconds:.0f} s")


def measure_names(policy: Path, stage: Path, settings: dict[str, object]) -> None:
    """Measure a policy's replies to turns whose names are in no training, unless that is done."""
    from demo.roleplay.run import run_trainer

    if (stage / "evaluation.jsonl").is_file():
        return
    chosen = {**settings, "policy.path": policy, "data.eval": UNSEEN_NAMES, "misc.run_dir": stage}
    run_trainer("evaluate", CONFIG, chosen, "--overwrite")


def run_plan(folder: Path, runs: list[tuple[str, int]], quick: bool, out: Path) -> None:
    """Run all runs; write the results after each."""
    from demo.roleplay.run import ENCODER, steps_of
    from evidence.roleplay.summary import summarise

    before = machine()
    folder.mkdir(parents=True, exist_ok=True)
    with running_service("embedder", folder, "--model", str(ENCODER)) as url:
        start = make_start(folder, url)
        settings: dict[str, object] = {
            **COMMON,
            "policy.path": start,
            "reward.embedding_model": url,
        }
        if quick:
            settings |= {**steps_of(2), "eval.eval_limit": 24}
        measure_names(start, names_folder(folder, None), settings)
        for name, seed in runs:
            train(name, seed, folder, settings)
            if name == ALL:
                last = sorted(run_folder(folder, name, seed).glob("checkpoints/step-*"))[-1]
                measure_names(last, names_folder(folder, seed), settings)
            write_json(out, {"machine": before, **summarise(folder)})


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/roleplay.md.")
    ] = False,
) -> None:
    """Train what does not stand in runs/roleplay_evidence; write results and page."""
    exit_on_sigterm()
    folder, out = (WORK / "roleplay_evidence", WORK) if quick else (RUNS, RESULTS)
    out = out / "roleplay_evidence.json"
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        runs = order(only or [], seeds or list(SEEDS))
        if not report:
            run_plan(folder, runs[:2] if quick else runs, quick, out)
        results = json.loads(out.read_text(encoding="utf-8"))
        from evidence.roleplay.report import show, write_page

        show(results)
        if not quick:
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
