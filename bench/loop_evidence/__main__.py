"""Does the loop of `make demo-loop` learn more than the same trainings without it?

Two arms, three seeds each, from the demo's cold-started searcher, on every fifth of the demo's
questions with 15 % of the references wrong (another seed, other errors): `loop` is
configs/search/demo_rounds.yaml; `plain` has the same trainings, as many updates of as many
episodes, and nothing between them, so that it plays all questions in each round. What the steps
between the trainings ask of servers, and the SFT, `loop` has besides. The last policies are
measured by one yardstick, greedy, on questions about documents that neither was trained on: the
final test, on which nothing was tuned, and the development set. Intervals are bootstraps over
questions, of the mean of the seeds.

    python -m bench.loop_evidence [--quick]     # what stands in runs/bench/loop_evidence is kept
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.common import WORK, Measurement, run
from bench.loop_evidence.rounds import SEEDS, compared, play, write_questions
from bench.search_evidence.__main__ import SIDE_BY_SIDE, running_services
from bench.search_evidence.sets import SETS
from demo.search.loop.run import rounds_of
from trainer.runs.run_log import read_jsonl

ARMS = ("loop", "plain")


def questions(quick: bool) -> Iterator[Measurement]:
    """All figures."""
    seeds, every, updates = ((1,), 20, 1) if quick else (SEEDS, 5, None)
    folder = WORK / ("loop_evidence_quick" if quick else "loop_evidence")
    folder.mkdir(parents=True, exist_ok=True)
    wrong = {
        seed: write_questions(folder / f"questions-{seed}.jsonl", every, seed) for seed in seeds
    }
    told = {"loop": rounds_of(updates), "plain": rounds_of(updates)}
    for of in told["plain"]["rounds"]:
        of["then"] = []
    jobs = [(arm, seed) for seed in seeds for arm in ARMS]
    with running_services(folder, list(SETS)) as urls, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(lambda job: play(folder, job[0], job[1], told[job[0]], urls), jobs))
    for of in SETS:
        yield from compared(folder, of, ARMS, seeds)
    yield from _planted(folder, wrong)


def _planted(folder: Path, wrong: Mapping[int, set[str]]) -> Iterator[Measurement]:
    """What `verify` made of the planted errors in the loop's first round."""
    found, lost = [], []
    for seed, ids in wrong.items():
        rows = read_jsonl(folder / f"loop-{seed}/01-phase1/verify/decisions.jsonl")
        dropped = [row["id"] for row in rows if not row["kept"]]
        found.append(100 * len(ids & set(dropped)) / len(ids))
        lost.append(100 * len(set(dropped) - ids) / (len(rows) - len(ids)))
    yield Measurement(
        "planted wrong references found", statistics.mean(found), "%", details={"seeds": found}
    )
    yield Measurement(
        "right references dropped", statistics.mean(lost), "%", details={"seeds": lost}
    )


if __name__ == "__main__":
    run("loop_evidence", __doc__, questions)
