"""Does SFT on rare successes help more than SFT on as many tokens of random successes?

All arms of a seed share two trainings: the first two rounds of `make demo-loop`, up to `focus`.
`rare` is then fine-tuned on what `distill` takes: right episodes of prompts that mostly fail.
`random`, the control, is fine-tuned on right episodes that are drawn at random from all that pass
the same checks, up to as many learned tokens. `none` gets no SFT. Then each arm has the same last
training on the rows that `focus` kept. The policies are measured as evidence/loop/rounds.py says,
before the last training ("after SFT") and after it.

    python -m evidence.loop.rare [--quick] [--seeds 1 2 3] [--jobs 2]   # runs/bench/rare is kept
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from bench.common import WORK, Measurement
from demo.search.loop.run import rounds_of
from demo.search.loop.wrong_references import write_questions
from demo.search.measured_sets import HELD_OUT, SETS, service_settings, shared_services
from evidence.loop.rounds import (
    SETTINGS,
    compared,
    measure_policy,
    play_rounds,
    run_seeds,
    run_trainer,
)
from scorekit.command import run_command
from trainer.runs.run_log import read_jsonl, write_jsonl

ARMS = ("rare", "random", "none")
_PAIRS = (("rare", "random"), ("rare", "none"), ("random", "none"))
#: Settings of `distill` that take every right episode that passes its checks.
_ALL_RIGHT = {"distill.rate_at_most": 1.0, "distill.per_prompt": 1000}


def questions(quick: bool, seeds: Sequence[int], jobs: int) -> Iterator[Measurement]:
    """Yield all measurements."""
    seeds, every, updates = ((1,), 20, 2) if quick else (seeds, 5, None)
    folder = WORK / ("rare_quick" if quick else "rare")
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        write_questions(folder / f"questions-{seed}.jsonl", every, seed)
    with shared_services(folder, list(SETS)) as urls, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: _play(folder, seed, updates, urls), seeds))
    for end in ("-sft", ""):
        for set_name in SETS:
            pairs = [(f"{first}{end}", f"{second}{end}") for first, second in _PAIRS]
            yield from compared(folder, set_name, pairs, seeds)
    for arm in ARMS[:2]:
        yield from _rows_of(folder, arm, seeds)


def _play(
    folder: Path, seed: int, updates: int | None, urls: Mapping[str, Mapping[str, str]]
) -> None:
    """Play the shared rounds, then each arm's SFT and last training, and measure both."""
    rounds = rounds_of(updates)
    rounds["train"]["reward"] = {"forced_completion": "score"}
    last = rounds["rounds"].pop()
    rounds["rounds"][-1]["then"].remove("sft")
    base = play_rounds(folder, "base", seed, rounds, urls)
    before = base / f"{len(rounds['rounds']):02d}-{rounds['rounds'][-1]['name']}"
    for arm in ARMS:
        policy = before / "policy"
        if arm != "none":
            rows = _write_rows(folder, arm, seed, before)
            policy = fine_tuned(folder, f"{arm}-{seed}", seed, policy, rows, rounds["sft"])
        measure_policy(folder, f"{arm}-sft", seed, policy, urls)
        settings: dict[str, Any] = {
            "data.train": before / "focus/rows.jsonl",
            "rl.num_updates": last["train"]["rl"]["num_updates"],
            "reward.forced_completion": "score",
            "misc.seed": seed,
            **service_settings(urls[HELD_OUT]),
        }
        trained = _trained(folder, f"{arm}-{seed}", policy, settings)
        measure_policy(folder, arm, seed, trained, urls)


def _write_rows(folder: Path, arm: str, seed: int, before: Path) -> Path:
    """Return the file of an arm's rows; `before` is the folder of the last shared round."""
    rare, path = before / "distill/rows.jsonl", folder / f"{arm}-{seed}-rows.jsonl"
    rows = read_jsonl(rare)
    if arm == "random":
        out, train = folder / f"right-{seed}", before / "train"
        if not (out / "rows.jsonl").is_file():
            flags = ("--config", before / "distill.yaml", "--run", train, "--out", out)
            record = before / "diagnose"
            log = folder / f"{arm}-{seed}.log"
            run_trainer(log, "search", "distill", *flags, "--record", record, **_ALL_RIGHT)
        target = sum(map(learned_tokens, rows))
        rows = drawn_rows(read_jsonl(out / "rows.jsonl"), target, seed)
    write_jsonl(path, rows)
    return path


def learned_tokens(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a row that have a loss.

    A run of ones in `action_mask` is a turn; the turns in `leave_out` have no loss.
    """
    turns = [len(list(run)) for is_action, run in groupby(row["action_mask"]) if is_action]
    left_out = set(row.get("leave_out", ()))
    return sum(length for number, length in enumerate(turns) if number not in left_out)


def drawn_rows(rows: Sequence[dict[str, Any]], target: int, seed: int) -> list[dict[str, Any]]:
    """Return rows in random order, as many as come nearest to `target` learned tokens."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    selection: list[dict[str, Any]] = []
    total = 0
    for row in shuffled:
        tokens = learned_tokens(row)
        if target - total <= tokens / 2:
            break
        selection.append(row)
        total += tokens
    return selection


def fine_tuned(
    folder: Path, name: str, seed: int, policy: Path, rows: Path, sft: Mapping[str, Any]
) -> Path:
    """Return the policy after SFT on the rows, which is made once.

    name: of its files in the folder. sft: the section of a loop's rounds.
    """
    to, run_dir, log = folder / f"{name}-policy-sft", folder / f"{name}-sft", folder / f"{name}.log"
    if to.is_dir():
        return to
    longest = max(len(row["input_ids"]) for row in read_jsonl(rows))
    config = {
        "task": "sft",
        "policy": {"path": str(policy)},
        "data": {"train": str(rows), "max_length": longest},
        "sft": sft["sft"],
        "misc": {"seed": seed, "run_dir": str(run_dir), "overwrite": True},
    }
    path = folder / f"{name}-sft.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    run_trainer(log, "sft", "--config", path)
    run_trainer(log, "export", run_dir, "--to", to)
    return to


def _trained(folder: Path, name: str, policy: Path, settings: Mapping[str, Any]) -> Path:
    """Return the policy after the last training, which is made once."""
    to, run_dir, log = folder / f"{name}-policy", folder / f"{name}-train", folder / f"{name}.log"
    if not to.is_dir():
        values = dict(settings) | {
            "policy.path": policy,
            "misc.run_dir": run_dir,
            "misc.overwrite": True,
        }
        run_trainer(log, "train", "--config", SETTINGS, **values)
        run_trainer(log, "export", run_dir, "--to", to)
    return to


def _rows_of(folder: Path, arm: str, seeds: Sequence[int]) -> Iterator[Measurement]:
    """Yield rows, learned tokens, prompts and success rates of an arm's SFT."""
    rows = {seed: read_jsonl(folder / f"{arm}-{seed}-rows.jsonl") for seed in seeds}
    values: dict[str, list[float]] = {
        "rows": [len(rows[seed]) for seed in seeds],
        "learned tokens": [sum(map(learned_tokens, rows[seed])) for seed in seeds],
        "prompts": [len({row["question_id"] for row in rows[seed]}) for seed in seeds],
        "success rate of a row's prompt": [
            statistics.mean(row["rate"] for row in rows[seed]) for seed in seeds
        ],
    }
    for name, by_seed in values.items():
        mean, details = statistics.mean(by_seed), {"seeds": by_seed}
        yield Measurement(f"SFT, {arm}: {name}", mean, "", details=details)


if __name__ == "__main__":
    run_command(lambda: run_seeds("rare", __doc__, questions), stdout="log")
