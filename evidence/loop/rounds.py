"""Trains in rounds by `trainer search loop`, and measures the last policies.

All are measured greedily, with the same settings, on questions about documents that none was
trained on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench.common import Measurement, measure, table
from demo.search.generator import create_app
from demo.search.loop.verifier import NAME, Verifying
from demo.search.measured_sets import HELD_OUT, SETS, service_settings
from evidence.seeds import seed_interval
from evidence.workers import SIDE_BY_SIDE
from scorekit.errors import UserError
from scorekit.paired import mean_interval
from scorekit.processes import end_with_parent
from testing.processes import child_environment, exit_on_sigterm, serving
from trainer.runs.run_log import read_jsonl

SEEDS = (1, 2, 3)
#: Phase 2 of the demo as it was when these arms were first measured.
SETTINGS = "evidence/loop/settings.yaml"
_SHOWN = {"reward": "reward_mean", "judge's score": "judge_mean", "NDCG": "ndcg_mean"}


def run_seeds(
    name: str,
    description: str | None,
    questions: Callable[[bool, Sequence[int], int], Iterator[Measurement]],
) -> None:
    """Parse the flags of a script, measure, print the table, and write bench/results/NAME.json.

    questions: (quick, seeds, jobs) -> the measurements; jobs: seeds that run at the same time.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the trainings")
    parser.add_argument("--jobs", type=int, default=SIDE_BY_SIDE, help="seeds at the same time")
    flags = parser.parse_args()
    exit_on_sigterm()
    seeds, jobs = flags.seeds, flags.jobs
    Console().print(table(measure(name, flags.quick, lambda quick: questions(quick, seeds, jobs))))


def play(
    folder: Path,
    arm: str,
    seed: int,
    rounds: Mapping[str, Any],
    urls: Mapping[str, Mapping[str, str]],
) -> Path:
    """Play the rounds of an arm and measure its last policy, once; return the loop's folder."""
    out = play_rounds(folder, arm, seed, rounds, urls)
    measure_policy(folder, arm, seed, _last_policy(out), urls)
    return out


def play_rounds(
    folder: Path,
    arm: str,
    seed: int,
    rounds: Mapping[str, Any],
    urls: Mapping[str, Mapping[str, str]],
) -> Path:
    """Play the rounds of an arm, each step once; return the loop's folder."""
    path, out = folder / f"{arm}-{seed}.yaml", folder / f"{arm}-{seed}"
    path.write_text(yaml.safe_dump(dict(rounds), sort_keys=False), encoding="utf-8")
    services = service_settings(urls[HELD_OUT])
    values: dict[str, Any] = {f"train.{key}": value for key, value in services.items()}
    values["train.data.train"] = folder / f"questions-{seed}.jsonl"
    values["train.misc.seed"] = seed
    with serving(create_app(name=NAME, answerer=Verifying(seed=seed))) as verifier:
        values["curation.verify.verifier.base_url"] = f"{verifier}/v1"
        values["curation.verify.verifier.model"] = NAME
        flags = ("--rounds", path, "--out", out)
        run_trainer(out.with_suffix(".log"), "search", "loop", *flags, **values)
    return out


def measure_policy(
    folder: Path, arm: str, seed: int, policy: Path, urls: Mapping[str, Mapping[str, str]]
) -> None:
    """Measure the policy of an arm on each set, once."""
    for set_name in SETS:
        run_dir = folder / f"{arm}-{seed}-{set_name}"
        if not (run_dir / "evaluation.json").is_file():
            settings: dict[str, Any] = {
                "data.eval": SETS[set_name].questions,
                "policy.path": policy,
                "reward.forced_completion": "score",
                "misc.run_dir": run_dir,
                **service_settings(urls[set_name]),
            }
            log = folder / f"{arm}-{seed}.log"
            run_trainer(log, "evaluate", "--config", SETTINGS, "--overwrite", **settings)


def _last_policy(out: Path) -> Path:
    """Return the policy of the last round that was played. The loop ends when no rows are left."""
    last = sorted(path for path in out.iterdir() if (path / "policy").is_dir())[-1]
    return last / "sft-policy" if (last / "sft-policy").is_dir() else last / "policy"


def run_trainer(log: Path, *arguments: object, **values: object) -> None:
    """Run `python -m trainer` with settings (key -> value). Raises UserError if it fails."""
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "trainer", *map(str, arguments), *flags]
    with log.open("ab") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=file,
            env=child_environment(),
            check=False,
            preexec_fn=end_with_parent(),
        )
    if done.returncode:
        raise UserError(f"{' '.join(command)} ended with exit code {done.returncode}: see {log}")


def compared(
    folder: Path, set_name: str, pairs: Sequence[tuple[str, str]], seeds: Sequence[int]
) -> Iterator[Measurement]:
    """Yield the stats of all arms on a set, and the difference of each pair of arms."""
    title = SETS[set_name].title
    for name, key in _SHOWN.items():
        for arm in dict.fromkeys(arm for pair in pairs for arm in pair):
            values = [_evaluation_stats(folder, arm, seed, set_name)[key] for seed in seeds]
            details = {"seeds": values}
            yield Measurement(
                f"{title}: {name}, {arm}", statistics.mean(values), "", details=details
            )
    for pair in pairs:
        yield _difference(folder, set_name, pair, seeds)


def _difference(
    folder: Path, set_name: str, pair: tuple[str, str], seeds: Sequence[int]
) -> Measurement:
    """Return the difference of two arms in the reward, by seed and by question."""
    first, second = (_by_question(folder, arm, seeds, set_name) for arm in pair)
    changes = [first[id] - second[id] for id in second]
    low, high = mean_interval(changes)
    by_seed = [
        _evaluation_stats(folder, pair[0], seed, set_name)["reward_mean"]
        - _evaluation_stats(folder, pair[1], seed, set_name)["reward_mean"]
        for seed in seeds
    ]
    over_seeds = seed_interval(by_seed)
    return Measurement(
        f"{SETS[set_name].title}: reward, {pair[0]} - {pair[1]}",
        over_seeds.mean,
        "",
        note=f"95 % over {len(seeds)} seeds: {over_seeds.as_text()}; over {len(changes)} "
        f"questions, these policies held fixed: {low:+.3f} to {high:+.3f}",
        details={
            "seeds": by_seed,
            "interval_of_seeds": [over_seeds.low, over_seeds.high],
            "interval_of_questions": [low, high],
            "questions": len(changes),
        },
    )


def _evaluation_stats(folder: Path, arm: str, seed: int, set_name: str) -> dict[str, Any]:
    path = folder / f"{arm}-{seed}-{set_name}/evaluation.json"
    stats: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stats


def _by_question(folder: Path, arm: str, seeds: Sequence[int], set_name: str) -> dict[str, float]:
    """Return id -> reward, the mean over the seeds. A missing reward fails the comparison."""
    rewards: dict[str, list[float]] = {}
    for seed in seeds:
        for line in read_jsonl(folder / f"{arm}-{seed}-{set_name}/evaluation.jsonl"):
            rewards.setdefault(line["question"]["id"], []).append(line["reward"]["value"])
    return {id: statistics.mean(values) for id, values in rewards.items()}
