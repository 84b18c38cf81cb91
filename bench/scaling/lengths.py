"""Measure the lengths of the demo's search episodes, for the simulation.

Two updates of the demo's small searcher are run on its slides, with the real retriever and the
trainer's own sampler. Measured are the tokens of prompts, turns and observations, the turns of an
episode, and the seconds of a tool call. The simulation draws from these values, which are written
to bench/results/scaling_lengths.json.

    python -m bench.scaling.lengths [--quick]
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bench.common import WORK, Measurement, in_own_process, quiet_logs, run
from testing.processes import exit_on_sigterm

NAME = "scaling_lengths"


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    from bench.search_step.__main__ import _retriever

    quiet_logs()
    exit_on_sigterm()  # else the retriever would outlive this process
    with _retriever() as url:
        lengths = in_own_process(_episode_lengths, url, 2 if quick else 6, 4 if quick else 16)
    for name, values in lengths.items():
        unit = "s" if name.endswith("_s") else "tokens" if "tokens" in name else "turns"
        mean = statistics.mean(values)
        yield Measurement(
            f"demo's search: {name}, mean",
            mean,
            unit,
            note=f"{len(values)} values, median {statistics.median(values):.3g}, "
            f"largest {max(values):.3g}",
            details={"name": name, "values": values},
        )


def _episode_lengths(retriever: str, num_questions: int, samples: int) -> dict[str, list[float]]:
    """Run two updates; return all measured values by name."""
    from bench.search_step.sides import Sizes, search_config
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search
    from trainer.search.trajectories.store import FOLDER, TrajectoryStore

    run_dir = WORK / NAME
    shutil.rmtree(run_dir, ignore_errors=True)
    sizes = Sizes(num_questions, samples, samples, 0, 2, 1)
    cfg = search_config(sizes, retriever, run_dir, data__train_limit="null")
    run_search(load_train(cfg), {}, cfg)
    lengths: dict[str, list[float]] = {
        name: []
        for name in ("prompt_tokens", "turn_tokens", "observation_tokens", "turns", "tool_s")
    }
    for episode in TrajectoryStore(run_dir / FOLDER).read([1, 2]):
        assert episode.tokens is not None
        lengths["prompt_tokens"].append(len(episode.tokens.prompt_ids))
        lengths["turns"].append(len(episode.turns))
        lengths["tool_s"] += [turn.tool_s for turn in episode.turns if turn.action == "search"]
        for is_sampled, count in _runs(episode.tokens.action_mask):
            lengths["turn_tokens" if is_sampled else "observation_tokens"].append(count)
    return lengths


def _runs(mask: Sequence[bool]) -> Iterator[tuple[bool, int]]:
    """Yield each run of equal values with its length."""
    for value, run_of_values in groupby(mask):
        yield value, sum(1 for _ in run_of_values)


def read_lengths(report: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return the measured values by name from the written report."""
    rows = (row["details"] for row in report["figures"])
    return {row["name"]: tuple(row["values"]) for row in rows}


if __name__ == "__main__":
    run(NAME, __doc__, questions)
