"""Are turns and episodes of a row's own worth more than as many that all rows share?

There are three arms with three seeds each, on every fifth of the demo's questions, 15 % of whose
references are wrong, from the demo's cold-started searcher. Each has three trainings, the second
and third on the rows that `focus` keeps. `budget` gives each row its own budget after `focus`: 4
episodes of 6 turns, twice the turns if the gold page had a low rank or none, twice the episodes if
success was rare, and nothing if the row is mastered. `equal` gives each row of a round the same
number of episodes of 6 turns, so that the turns add up to those of `budget` in that round and seed.
`online` has as many episodes in an update as `equal`, but 2 to 16 of a question, chosen by the
results so far (`rollout.online_budget`); its third training knows the results of the second.
Updates, rows per update, and all other settings are the same. Nothing is distilled. The last
policies are measured greedily, at 6 turns, on the final test and on the development set
(evidence/loop/rounds.py).

    python -m evidence.loop.budgets [--quick] [--seeds 1 2 3] [--jobs 2]

What is in runs/bench/budgets is kept.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.common import WORK, Measurement
from demo.search.loop.run import rounds_of
from demo.search.loop.wrong_references import write_questions
from demo.search.measured_sets import SETS, shared_services
from evidence.loop.rounds import compared, play, run_seeds
from scorekit.command import run_command
from trainer.runs.run_log import read_jsonl
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

ARMS = ("budget", "online", "equal")
_PAIRS = (("budget", "equal"), ("online", "equal"), ("online", "budget"))
_OWN = {"n_agent": 4, "rare_agents": 8, "max_turns": 6, "deep_turns": 12}
_ONLINE = {"n_min": 2, "n_max": 16}
_LENGTH = 480  # tokens of an episode: room for 12 turns
_SPENT = ("episodes", "the policy's turns")
_MIXED = "share of groups with right and wrong answers"


def questions(quick: bool, seeds: Sequence[int], jobs: int) -> Iterator[Measurement]:
    """Yield all measurements."""
    seeds, every, updates = ((1,), 20, 1) if quick else (seeds, 5, None)
    folder = WORK / ("budgets_quick" if quick else "budgets")
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        write_questions(folder / f"questions-{seed}.jsonl", every, seed)
    with shared_services(folder, list(SETS)) as urls, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: _play_arms(folder, seed, updates, urls), seeds))
    for set_name in SETS:
        yield from compared(folder, set_name, _PAIRS, seeds)
    for arm in ARMS:
        yield from _spent(folder, arm, seeds)


def _play_arms(
    folder: Path, seed: int, updates: int | None, urls: Mapping[str, Mapping[str, str]]
) -> None:
    """Play the arms one after the other: the others spend what the first has spent."""
    rounds = rounds_of(updates)
    rounds["curation"] = {"verify": rounds["curation"]["verify"], "budget": _OWN}
    rounds["train"]["episode"] = {"max_response_length": _LENGTH, "max_turns": _OWN["max_turns"]}
    rounds["train"]["reward"] = {"forced_completion": "score"}
    for round_config in rounds["rounds"]:
        steps = [
            step
            for step in round_config.get("then", [])
            if step not in ("diagnose", "hallucinations", "distill", "sft")
        ]
        round_config["then"] = steps
    equal = copy.deepcopy(rounds)
    for round_config in rounds["rounds"][:-1]:
        round_config["then"].append("budget")
    out = play(folder, "budget", seed, rounds, urls)
    for number, (before, round_config) in enumerate(
        zip(equal["rounds"], equal["rounds"][1:], strict=False)
    ):
        manifest = out / f"{number + 1:02d}-{before['name']}/budget/manifest.json"
        if manifest.is_file():  # else the rows have ended, and its rounds with them
            manifest_values = json.loads(manifest.read_text(encoding="utf-8"))
            round_config["train"]["rollout"] = {
                "n_agent": max(2, round(manifest_values["equal_n_agent"]))
            }
    play(folder, "equal", seed, equal, urls)
    online = copy.deepcopy(equal)
    for round_config in online["rounds"][1:]:
        round_config["train"].setdefault("rollout", {})["online_budget"] = dict(_ONLINE)
    second = str(folder / f"online-{seed}/02-{online['rounds'][1]['name']}/train")
    online["rounds"][2]["train"]["rollout"]["online_budget"]["earlier"] = [second]
    play(folder, "online", seed, online, urls)


def _spent(folder: Path, arm: str, seeds: Sequence[int]) -> Iterator[Measurement]:
    """Return what the second and third training have played, and how many groups could teach."""
    spent: dict[str, list[Any]] = {name: [] for name in (*_SPENT, _MIXED)}
    for seed in seeds:
        runs = sorted((folder / f"{arm}-{seed}").glob("0[23]-*/train"))
        lines = [line for run in runs for line in read_jsonl(run / "log.jsonl")]
        spent["episodes"].append(sum(line["samples"] for line in lines))
        spent["the policy's turns"].append(
            sum(line["samples"] * line["turns_mean"] for line in lines)
        )
        outcomes: dict[tuple[Path, int, str], set[bool | None]] = defaultdict(set)
        for run in runs:
            for episode in TrajectoryStore(run / FOLDER).read(tokens=False):
                outcomes[run, episode.step, episode.group].add(episode.success)
        mixed = sum({True, False} <= kinds for kinds in outcomes.values())
        spent[_MIXED].append(mixed / len(outcomes))
    for name, values in spent.items():
        yield Measurement(
            f"rounds 2 and 3: {name}, {arm}",
            statistics.mean(values),
            "",
            details={"seeds": values},
        )


if __name__ == "__main__":
    run_command(lambda: run_seeds("budgets", __doc__, questions), stdout="log")
