"""Compare the cost of a searcher's update with TRL's GRPOTrainer, and measure what streaming saves.

The demo's small searcher reads the demo's slides as text, in at most six turns. Its retriever is a
real process. TRL gets the same policy, questions and seeds, a reward that costs nothing, GSPO with
the same clip range, and as many optimizer steps. TRL computes the old log-probabilities again; ours
are the sampler's, which in float32 equal the trainer's own. Each run is a separate process. Its
first update is a warm-up and is not counted.

Streaming: full updates of ours with a generator that takes seconds and a judge that takes less.
They are asked as each episode ends while others still search, or only when the last one has ended.

    python -m bench.search_step [--quick]
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.common import Measurement, in_own_process, quiet_logs, run
from bench.search_step.sides import FOLDER, Sizes, scorekit_side, trl_side
from bench.search_step.streaming import DELAYS, answering_servers, update_with_answers
from bench.trl_step import compare_cost, run_sides
from testing.processes import exit_on_sigterm


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    quiet_logs()
    exit_on_sigterm()  # else the retriever would outlive who is ended
    sizes = Sizes(2, 4, 4, 1, 1, 1) if quick else Sizes()
    with _retriever() as url:
        yield from _beside_trl(sizes, url)
        yield from _streaming(sizes, url)


def _beside_trl(sizes: Sizes, url: str) -> Iterator[Measurement]:
    runs_by_side = run_sides(sizes.runs, scorekit_side, trl_side, sizes, url)
    texts = {name: runs[0]["first_texts"] for name, runs in runs_by_side.items()}
    same = sum(text in texts["trl"] for text in texts["ours"]) / len(texts["ours"])
    for run_result in (*runs_by_side["ours"], *runs_by_side["trl"]):
        del run_result["first_texts"]
    yield from compare_cost(sizes, runs_by_side, "updates_s")
    medians = {name: _median_beside_episodes(runs) for name, runs in runs_by_side.items()}
    yield Measurement("  time of ours without the episodes", medians["ours"], "s")
    yield Measurement("  TRL's", medians["trl"], "s")
    yield Measurement("  time of ours", medians["ours"] / medians["trl"], "times TRL's")
    yield Measurement(
        "  share of the first update's episodes that are the same", same, "", at_least=1.0
    )


def _streaming(sizes: Sizes, url: str) -> Iterator[Measurement]:
    runs_by_mode: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with answering_servers() as servers:
        for _ in range(sizes.runs):
            for streams in runs_by_mode:
                run_result = in_own_process(update_with_answers, sizes, url, servers, streams)
                runs_by_mode[streams].append(run_result)
    streamed, batch = (_median(runs_by_mode[streams]) for streams in (True, False))
    waits = {
        streams: statistics.median(wait for run_result in runs for wait in run_result["waited_s"])
        for streams, runs in runs_by_mode.items()
    }
    yield Measurement(
        "update, rewards asked for as episodes end",
        streamed,
        "s",
        details={"delays": DELAYS, "runs": runs_by_mode[True]},
    )
    yield Measurement(
        "  asked for when the last has ended", batch, "s", details={"runs": runs_by_mode[False]}
    )
    yield Measurement("  wait for rewards behind the last turn, streamed", waits[True], "s")
    yield Measurement("  the same, not streamed", waits[False], "s")
    yield Measurement("  saved of the wait", 1 - waits[True] / waits[False], "")


def _median_beside_episodes(runs: list[dict[str, Any]]) -> float:
    return statistics.median(
        seconds - parts["rollout_s"]
        for run_result in runs
        for seconds, parts in zip(run_result["updates_s"], run_result["parts"], strict=True)
    )


def _median(runs: list[dict[str, Any]]) -> float:
    return statistics.median(s for run_result in runs for s in run_result["updates_s"])


@contextmanager
def _retriever() -> Iterator[str]:
    """Serve a retriever on the demo's slides."""
    from demo.search.run import HERE, ingest
    from testing.processes import running_service

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    ingest(FOLDER / "index", HERE / "corpus")
    with running_service("retriever", FOLDER, "--index", str(FOLDER / "index")) as url:
        yield url


if __name__ == "__main__":
    run("search_step", __doc__, questions)
