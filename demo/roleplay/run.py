"""The role-play demo: template check, SFT with the repaired template, GRPO with five rewards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from demo.common import (
    DATA,
    MODELS,
    ROOT,
    TRAINER_THREADS,
    console,
    print_step,
    run_checked,
    set_flags,
)
from demo.roleplay.compare import read_stage, show_samples, show_stats, verdict
from scorekit.errors import UserError
from testing.processes import exit_on_sigterm, run_module, running_service

POLICY, ENCODER = MODELS / "roleplay_policy", MODELS / "encoder"
SFT_DATA = DATA / "roleplay/sft_noisy.jsonl"
SFT, GRPO = ROOT / "configs/sft/demo.yaml", ROOT / "configs/roleplay/demo.yaml"
#: Exit code of a template check that found something.
FOUND = 2


def run_demo(
    run_dir: Path,
    *,
    sft_steps: int | None = None,
    grpo_steps: int | None = None,
    limit: int | None = None,
) -> None:
    """Run the demo. Raise UserError if a part of it cannot run."""
    started = time.monotonic()
    exit_on_sigterm()
    run_dir.mkdir(parents=True, exist_ok=True)
    template, mended = run_dir / "chat_template.fixed.jinja", run_dir / "sft-policy"
    limits = {"misc.threads": TRAINER_THREADS, "eval.eval_limit": limit}
    print_step("1", "Where does a reply end? The chat template of the policy, checked")
    check_template(template)
    print_step("2", "Serving the sentence encoder for the rewards")
    with running_service("embedder", run_dir, "--model", str(ENCODER)) as url:
        console.print(f"   {url}   (log in {run_dir}/)")
        rewards = {"reward.embedding_model": url, **limits}
        print_step("3", "The policy as it comes, on scenarios that are in no training")
        start = {"policy.path": POLICY, "misc.run_dir": run_dir / "start"}
        run_trainer("evaluate", GRPO, {**start, **rewards}, "--overwrite")
        print_step("4", "SFT on the same noisy dialogues, the template mended")
        train_sft(run_dir / "sft", template, mended, sft_steps, TRAINER_THREADS)
        print_step("5", "GRPO with five rewards")
        grpo = {"policy.path": mended, "misc.run_dir": run_dir / "grpo", "misc.overwrite": "true"}
        shorter = {} if grpo_steps is None else steps_of(grpo_steps)
        run_trainer("train", GRPO, {**grpo, **rewards, **shorter})
    print_step("6", "Which training mended what?")
    show(run_dir, started)


def check_template(mended: Path) -> None:
    """Check that `template-check` finds the template's error, and that `--fix` repairs it."""
    arguments = ["--model", str(POLICY), "--data", str(SFT_DATA), "--limit", "50", "--show", "1"]
    code = run_module("trainer", "template-check", *arguments)
    if code != FOUND:
        raise UserError(f"template-check ended with exit code {code}, where it must find a fault")
    console.print("   [bold]mended:[/] what ends a turn is learned, too")
    mended.unlink(missing_ok=True)
    if code := run_module("trainer", "template-check", *arguments, "--fix", "--to", str(mended)):
        raise UserError(f"the mended template is still at fault (exit code {code})")


def train_sft(
    folder: Path, template: Path, to: Path, steps: int | None, threads: int | None = None
) -> None:
    """Run SFT from the start policy, and export its last checkpoint as a plain folder.

    steps, threads: None: the config's.
    """
    settings: dict[str, object] = {
        "chat.template": template,
        "misc.run_dir": folder,
        "misc.overwrite": "true",
        "misc.threads": threads,
        "sft.max_steps": steps,
    }
    run_trainer("sft", SFT, settings)
    if to.exists():
        shutil.rmtree(to)
    run_checked("trainer", "export", str(folder), "--to", str(to))


def steps_of(updates: int) -> dict[str, object]:
    """Return the settings of a shorter GRPO run. Its warm-up may not be longer than the run."""
    return {"grpo.max_steps": updates, "grpo.warmup_steps": min(3, updates - 1)}


def run_trainer(command: str, config: Path, settings: Mapping[str, object], *flags: str) -> None:
    """Run `python -m trainer COMMAND` in a separate process, as a user would."""
    run_checked("trainer", command, "--config", str(config), *set_flags(settings), *flags)


def show(run_dir: Path, started: float) -> None:
    """Print tables, samples, and what they mean."""
    stages = [
        read_stage("as it comes", run_dir / "start"),
        read_stage("after SFT", run_dir / "grpo", first=True),
        read_stage("after GRPO", run_dir / "grpo"),
    ]
    show_stats(console, stages)
    show_samples(console, stages)
    for sentence in verdict(stages):
        console.print(f"   {sentence}")
    console.print(f"\n[bold]report[/]  {run_dir / 'grpo/report.html'}", soft_wrap=True)
    console.print(f"[bold]time[/]    {time.monotonic() - started:.0f} s")
