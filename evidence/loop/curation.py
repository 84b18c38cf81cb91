"""Trains two rounds with curation between them, with random rows, or without any.

All arms of a seed share the first round: the training of `evidence.search` with both rewards, from
the same start. Then
- `loop` is fine-tuned on what `search distill` takes, and trains on what `search focus` takes;
- `random` is fine-tuned on as many learned tokens of random right episodes, and trains on as many
  random questions of the first round;
- `plain` trains on all questions, with further updates for the tokens of the others' SFT.
They are measured greedily on the questions about new documents of `evidence.search`.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench.common import WORK, machine, write_json
from demo.search.make_corpus import TRAIN
from demo.search.measured_sets import HELD_OUT
from evidence.gain.runs import processor_seconds
from evidence.loop.rare import drawn_rows, fine_tuned, learned_tokens
from evidence.loop.rounds import run_trainer
from evidence.search.arms import COMMON, CONFIG, MEASURED, NEW, POLICY, SETTINGS, YARDSTICK, Plan
from evidence.search.runs import Services, measure_policy, open_services, start_digest
from evidence.search.summary import stats_of
from trainer.runs.run_log import read_jsonl, write_jsonl

FOLDER = WORK / "loop"
FIRST, LOOP, RANDOM, PLAIN = "first", "loop", "random", "plain"
ARMS = {
    FIRST: "after the first round",
    LOOP: "loop: focus and distill",
    RANDOM: "random rows in their place",
    PLAIN: "plain training, as many tokens",
}
SEEDS = (1, 2, 3, 4, 5)
#: A question is played again if the judge's mean of its episodes is at most this.
HARD = 0.5
SFT = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1.0e-4}
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a seed.

    updates: of each round, of `batch` questions of `n_agent` episodes.
    limit: of the questions that measure; None: all.
    set_name: of these questions.
    """

    updates: int = 8
    batch: int = 6
    n_agent: int = 8
    limit: int | None = None
    set_name: str = NEW


QUICK = Size(updates=2, batch=2, n_agent=4, limit=3, set_name=HELD_OUT)


def run_seeds(
    only: Sequence[str], seeds: Sequence[int], size: Size, folder: Path, results: Path
) -> None:
    """Run what is missing, seed by seed."""
    names = [name for name in ARMS if not only or name in only]
    missing = [
        (seed, name) for seed in seeds for name in names if not is_done(results, name, seed, size)
    ]
    if not missing:
        return
    # What was trained with other sizes, or from another start, is never taken up
    trained = folder / f"{start_digest()[:8]}-{size.updates}x{size.batch}x{size.n_agent}"
    trained.mkdir(parents=True, exist_ok=True)
    plan = Plan((), folder, results, (size.set_name,))
    with open_services(plan) as services:
        for seed, name in missing:
            run_one(trained, results, name, seed, size, services)


def is_done(results: Path, name: str, seed: int, size: Size) -> bool:
    """Return whether a run has a result of these sizes, from the start as it is now."""
    path = results / f"{name}-{seed}.json"
    if not path.is_file():
        return False
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return bool(recorded["size"] == asdict(size) and recorded["start"] == start_digest())


def run_one(
    folder: Path, results: Path, name: str, seed: int, size: Size, services: Services
) -> None:
    """Train what is missing of a run, measure its policy, and write its result."""
    spent = processor_seconds()
    first = play_first(folder, seed, size, services[HELD_OUT])
    data: dict[str, Any] = {}
    policy = first / "policy"
    if name != FIRST:
        policy, data = train_second(folder, first, name, seed, size, services[HELD_OUT])
    spent, before = processor_seconds() - spent, processor_seconds()
    measured = folder / f"{name}-{seed}-measured.jsonl"
    settings = [*YARDSTICK, "rollout.deterministic=true", *services[size.set_name]]
    questions = MEASURED[size.set_name].questions
    measure_policy(CONFIG, settings, policy, questions, measured, size.limit)
    shutil.rmtree(measured.with_suffix(""))
    stats = stats_of(read_jsonl(measured))
    write_json(
        results / f"{name}-{seed}.json",
        {
            "arm": name,
            "seed": seed,
            "start": start_digest(),
            "size": asdict(size),
            "commit": machine()["commit"],
            "processor_seconds": round(spent, 1),
            "measuring_seconds": round(processor_seconds() - before, 1),
            "data": data,
            "stats": stats,
        },
    )
    console.print(f"{ARMS[name]}, seed {seed}: {spent:.0f} processor seconds, {stats['right']:.3f}")


def settings_of(size: Size, updates: int, seed: int, services: Sequence[str]) -> dict[str, str]:
    """Return what a training changes in CONFIG."""
    sizes = (
        f"rl.num_updates={updates}",
        f"rl.batch_size={size.batch}",
        f"rollout.n_agent={size.n_agent}",
        f"misc.seed={seed}",
    )
    pairs = (text.partition("=") for text in (*COMMON, *SETTINGS, *services, *sizes))
    return {key: value for key, _, value in pairs}


def play_first(folder: Path, seed: int, size: Size, services: Sequence[str]) -> Path:
    """Play the first round and its curation by `search loop`; return the round's folder.

    What is there is not played again.
    """
    out, path = folder / f"round-{seed}", folder / f"round-{seed}.yaml"
    if (out / "01-first/distill/rows.jsonl").is_file():
        return out / "01-first"
    rounds = {
        "rounds": [
            {"name": "first", "config": str(CONFIG), "then": ["buckets", "focus", "distill"]}
        ],
        "curation": {
            "buckets": {"measure": "judge"},
            "focus": {"measure": "judge", "take": ["last_round"], "last_round": HARD},
            # This searcher asks on to its last turn, often in the same words
            "distill": {"repeats": "mask", "ended": "any"},
        },
    }
    path.write_text(yaml.safe_dump(rounds, sort_keys=False), encoding="utf-8")
    settings = settings_of(size, size.updates, seed, services)
    values = {f"train.{key}": value for key, value in settings.items()}
    values["train.policy.path"] = str(POLICY)
    flags = ("--rounds", path, "--out", out)
    run_trainer(out.with_suffix(".log"), "search", "loop", *flags, **values)
    return out / "01-first"


def train_second(
    folder: Path, first: Path, name: str, seed: int, size: Size, services: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """Return the policy of the second round, and what it learned from. `first`: the first round."""
    log, out = folder / f"{name}-{seed}.log", folder / f"{name}-{seed}"
    distilled, focused = (read_jsonl(first / step / "rows.jsonl") for step in ("distill", "focus"))
    tokens = sum(map(learned_tokens, distilled))
    policy, rows, updates = first / "policy", Path(TRAIN), size.updates
    data: dict[str, Any] = {}
    if name == PLAIN:
        further = round(int(SFT["num_train_epochs"]) * tokens / tokens_of_update(first / "train"))
        updates += further
        data = {"further_updates": further}
    else:
        if name == RANDOM:
            distilled = drawn_rows(right_rows(folder, first, seed, log), tokens, seed)
            focused = random_rows(first, len(focused), seed)
        rows, sft_rows = out.with_suffix(".rows.jsonl"), out.with_suffix(".sft.jsonl")
        write_jsonl(rows, focused)
        write_jsonl(sft_rows, distilled)
        data = {"questions": len(focused), "sft_rows": len(distilled)}
        data["sft_tokens"] = sum(map(learned_tokens, distilled))
        if distilled:
            policy = fine_tuned(folder, out.name, seed, policy, sft_rows, {"sft": SFT})
    # Another seed than the first round's: else it would play that round's questions again
    settings = settings_of(size, updates, 100 + seed, services)
    settings |= {"data.train": str(rows), "policy.path": str(policy)}
    exported = folder / f"{out.name}-policy"
    if not exported.is_dir():
        shutil.rmtree(out, ignore_errors=True)
        run_trainer(log, "train", "--config", CONFIG, **settings, **{"misc.run_dir": out})
        run_trainer(log, "export", out, "--to", exported)
    return exported, data | {
        "updates": updates,
        "rl_tokens": round(updates * tokens_of_update(out)),
    }


def right_rows(folder: Path, first: Path, seed: int, log: Path) -> list[dict[str, Any]]:
    """Return a row of every right episode of the first round that passes `distill`'s checks."""
    out = folder / f"right-{seed}"
    if not (out / "rows.jsonl").is_file():
        flags = ("--config", first / "distill.yaml", "--run", first / "train", "--out", out)
        every = {"distill.rate_at_most": 1.0, "distill.per_prompt": 1000}
        run_trainer(log, "search", "distill", *flags, **every)
    return read_jsonl(out / "rows.jsonl")


def random_rows(first: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Return so many random rows of the questions that the first round played."""
    buckets = read_jsonl(first / "buckets/rows.jsonl")
    played = [row for row in buckets if row["bucket"] != "unscored"]
    return random.Random(seed).sample(played, min(count, len(played)))


def tokens_of_update(run: Path) -> float:
    """Return the mean number of tokens that all episodes of an update of a run wrote."""
    return statistics.fmean(line["tokens"] for line in read_jsonl(run / "log.jsonl"))
