"""The demo: two services, 200 scored translations, PPO against the services, before and after."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

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
from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.paired import mean_interval
from scorekit.report.render import STYLES, as_rich_text, visible
from scorekit.schemas import Scored
from testing.processes import exit_on_sigterm, running_services
from trainer.runs.run_log import read_jsonl
from trainer.translation.evaluation.report import write_report

CONFIG = ROOT / "configs/translation/demo.yaml"
SCORED = 200  # translations that are scored first
WORST = 8  # of them shown


def run_demo(run_dir: Path, *, updates: int | None = None, limit: int | None = None) -> None:
    """Run the demo. Raise UserError if a part of it cannot run."""
    started = time.monotonic()
    exit_on_sigterm()
    run_dir.mkdir(parents=True, exist_ok=True)
    print_step("1", "Starting MetricX and xCOMET (small trained models) as HTTP services")
    # A score that depends on which requests met in a batch differs in its last bits from run to
    # run, and some updates later a sample does.
    services = {
        name: ("--own-batches", "--model", str(MODELS / name)) for name in ("metricx", "xcomet")
    }
    # Nor may it depend on what a run before has left in the caches: the rest makes other batches.
    for name in services:
        for cache_file in run_dir.glob(f"{name}.sqlite*"):
            cache_file.unlink()
    with running_services(run_dir, services) as urls:
        metricx_url, xcomet_url = urls["metricx"], urls["xcomet"]
        console.print(f"   {metricx_url}   {xcomet_url}   (logs in {run_dir}/)")
        print_step("2", f"Scoring {SCORED} real translations; the worst of them, errors marked")
        score_real_translations(metricx_url, xcomet_url)
        print_step("3", "Evaluating the policy, training it by PPO, evaluating it again")
        train(run_dir, metricx_url, xcomet_url, updates, limit)
    print_step("4", "Was the reward earned?")
    verdict = compare(run_dir)
    report = write_report(run_dir, "Demo: PPO against MetricX and xCOMET services", NOTES + verdict)
    console.print(f"\n[bold]report[/]  {report}", soft_wrap=True)
    console.print(f"[bold]time[/]    {time.monotonic() - started:.0f} s")


#: What a reader of the report must know.
NOTES = [
    "A translation policy of 4.2 million parameters (English to Korean user-interface strings) was "
    "hurt on purpose: its last training saw noisy bitext, in which a part of the targets was the "
    "English source or was cut short. PPO, rewarded by two learned metrics over HTTP, repairs it.",
    "The rewards are MetricX (5 - score, the same for every token) and xCOMET's error spans (a "
    "penalty on the tokens they cover). chrF and BLEU against the true translations are no part of "
    "the reward: they show whether it was earned or gamed.",
]


def score_real_translations(metricx_url: str, xcomet_url: str) -> None:
    """Score true translations with both services and print the ones that MetricX likes least."""
    rows = read_jsonl(DATA / "heldout.jsonl")[:SCORED]
    if not rows:
        raise UserError(
            f"{DATA / 'heldout.jsonl'} is missing: run the demo from a complete checkout"
        )
    samples = [{"src": row["src_text"], "mt": row["ref_text"]} for row in rows]
    with SyncScoringClient(metricx_url) as metricx, SyncScoringClient(xcomet_url) as xcomet:
        scores, spans = metricx.score(samples), xcomet.score(samples)
    scored = [
        (a, b, sample)
        for a, b, sample in zip(scores, spans, samples, strict=True)
        if isinstance(a, Scored) and isinstance(b, Scored)
    ]
    scored.sort(key=lambda entry: -entry[0].score)
    table = Table("MetricX", "xCOMET", "source", "translation", title_justify="left")
    for a, b, sample in scored[:WORST]:
        marked = as_rich_text(sample["mt"], b.error_spans or [])
        table.add_row(f"{a.score:.2f}", f"{b.score:.3f}", Text(visible(sample["src"])), marked)
    console.print(table)
    legend = Text("   marked: ").append("minor", STYLES["MINOR"]).append(" ")
    legend.append("major", STYLES["MAJOR"]).append(" ").append("critical", STYLES["CRITICAL"])
    console.print(legend)
    means = [np.mean([a.score for a, _, _ in scored]), np.mean([b.score for _, b, _ in scored])]
    console.print(
        f"   {len(scored)} of {len(samples)} scored; mean MetricX {means[0]:.2f} "
        f"(lower is better), mean xCOMET {means[1]:.3f}"
    )


def train(
    run_dir: Path, metricx_url: str, xcomet_url: str, updates: int | None, limit: int | None
) -> None:
    """Run `python -m trainer train` in a separate process, as a user would."""
    settings: dict[str, object] = {
        "misc.run_dir": run_dir,
        "misc.overwrite": "true",
        "misc.threads": TRAINER_THREADS,
    }
    if updates is not None:  # the warm-up of the config may be longer than so short a run
        settings |= {"rl.num_updates": updates, "rl.warmup_updates": min(3, updates - 1)}
    settings["eval.eval_limit"] = limit
    command = ["trainer", "train", "--config", str(CONFIG), *set_flags(settings)]
    run_checked(*command, env={"METRICX_URL": metricx_url, "XCOMET_URL": xcomet_url})


def compare(run_dir: Path) -> list[str]:
    """Return sentences that say whether the reward improved. They are printed, and added to the
    report.
    """
    evals = read_jsonl(run_dir / "eval.jsonl")
    before, after = (read_jsonl(run_dir / line["completions"]) for line in (evals[0], evals[-1]))
    differences = [a["chrf"] - b["chrf"] for a, b in zip(after, before, strict=True)]
    low, high = mean_interval(differences)
    conclusion = "earned" if low > 0 else "not shown to be earned"
    verdict = (
        f"Sentence chrF changed by {np.mean(differences):+.2f} on average over "
        f"{len(differences)} held-out sources (95 % interval of a paired bootstrap: {low:+.2f} to "
        f"{high:+.2f}): by this measure the reward was {conclusion}."
    )
    repair = "It is a repair: the policy had been damaged on purpose."
    console.print(f"   {verdict} {repair}")
    return [f"{verdict} {repair}"]
