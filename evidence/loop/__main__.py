"""Does the loop of `make demo-loop` learn more than the same trainings without it?

There are two arms with three seeds each. Both start from the demo's cold-started searcher, on every
fifth of the demo's questions, with 15 % of the references wrong (another seed, other errors).
`loop` is configs/search/demo_rounds.yaml. `plain` has the same trainings, with as many updates of
as many episodes, but nothing between them, so it plays all questions in each round. `loop` has the
additional cost of the requests between the trainings and of the SFT. The last policies are measured
greedily with the same settings, on questions about documents that neither was trained on: the final
test, on which nothing was tuned, and the development set. Intervals are bootstraps over questions,
of the mean of the seeds.

    python -m evidence.loop [--quick]     # what is in runs/bench/loop_evidence is kept
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.common import WORK, Measurement
from demo.search.loop.run import rounds_of
from demo.search.loop.wrong_references import write_questions
from demo.search.measured_sets import SETS, running_services
from evidence.loop.rounds import compared, play, run_seeds
from scorekit.command import run_command
from trainer.runs.run_log import read_jsonl

ARMS = ("loop", "plain")


def questions(quick: bool, seeds: Sequence[int], jobs: int) -> Iterator[Measurement]:
    """Yield all measurements."""
    seeds, every, updates = ((1,), 20, 1) if quick else (seeds, 5, None)
    folder = WORK / ("loop_evidence_quick" if quick else "loop_evidence")
    folder.mkdir(parents=True, exist_ok=True)
    wrong = {
        seed: write_questions(folder / f"questions-{seed}.jsonl", every, seed) for seed in seeds
    }
    rounds_by_arm = {"loop": rounds_of(updates), "plain": rounds_of(updates)}
    for round_config in rounds_by_arm["loop"]["rounds"]:  # this generator knows nothing by heart
        steps = round_config.get("then", [])
        round_config["then"] = [step for step in steps if step != "hallucinations"]
    for round_config in rounds_by_arm["plain"]["rounds"]:
        round_config["then"] = []
    runs = [(arm, seed) for seed in seeds for arm in ARMS]
    with running_services(folder, list(SETS)) as urls, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: play(folder, run[0], run[1], rounds_by_arm[run[0]], urls), runs))
    for set_name in SETS:
        yield from compared(folder, set_name, [ARMS], seeds)
    yield from _planted(folder, wrong)


def _planted(folder: Path, wrong: Mapping[int, set[str]]) -> Iterator[Measurement]:
    """Yield how `verify` classed the planted errors in the loop's first round."""
    found_shares, dropped_shares = [], []
    for seed, ids in wrong.items():
        rows = read_jsonl(folder / f"loop-{seed}/01-phase1/verify/decisions.jsonl")
        dropped = [row["id"] for row in rows if not row["kept"]]
        found_shares.append(100 * len(ids & set(dropped)) / len(ids))
        dropped_shares.append(100 * len(set(dropped) - ids) / (len(rows) - len(ids)))
    yield Measurement(
        "planted wrong references found",
        statistics.mean(found_shares),
        "%",
        details={"seeds": found_shares},
    )
    yield Measurement(
        "right references dropped",
        statistics.mean(dropped_shares),
        "%",
        details={"seeds": dropped_shares},
    )


if __name__ == "__main__":
    run_command(lambda: run_seeds("loop_evidence", __doc__, questions), stdout="log")
