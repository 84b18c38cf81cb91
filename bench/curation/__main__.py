"""Measure the time and memory of the curation commands on 20,000 and on 200,000 episodes.

Each command runs in its own process and reads the same stores (bench/curation/generate_store.py).
Measured are the seconds of the command and the peak memory of its process. 20,000 episodes of
2,500 and of 25,000 questions show the cost of a question. 20,000 and 200,000 episodes of 25,000
questions show the cost of an episode (62 kB on disk).

    python -m bench.curation [--quick]
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import WORK, Measurement, in_own_process, run
from bench.curation.generate_store import SAMPLES, write_store
from bench.curation.measure_command import measure_command

FOLDER = WORK / "curation"
#: Command and its flags.
COMMANDS: dict[str, tuple[str, ...]] = {
    "buckets": (),
    "focus": ("--set", "focus.hard_a=0.3"),
    "budget": (),
    "distill": ("--set", "distill.repeats=mask"),
}
#: Most that an episode may add to what a command holds: its summary, its id and a note.
MOST_BYTES = 2000


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    small, large = (400, 4_000) if quick else (20_000, 200_000)
    all_questions = large // SAMPLES
    sizes = ((small, small // SAMPLES), (small, all_questions), (large, all_questions))
    shutil.rmtree(FOLDER, ignore_errors=True)
    stores = {}
    for size in sizes:
        episodes, num_questions = size
        started = time.perf_counter()
        stores[size] = write_store(
            FOLDER / f"run-{num_questions}-{episodes}", episodes, num_questions
        )
        packed = sum(path.stat().st_size for path in stores[size].rglob("*.gz"))
        yield Measurement(
            f"a store of {episodes:,} episodes of {num_questions:,} questions is written in",
            time.perf_counter() - started,
            "s",
            details={"mib": packed / 2**20},
        )
    for command in COMMANDS:
        usage_by_size = {size: _measure(command, store) for size, store in stores.items()}
        for (episodes, num_questions), usage in usage_by_size.items():
            name = f"{command}, {episodes:,} episodes of {num_questions:,} questions"
            yield Measurement(name, usage["wall_s"], "s", details=usage)
        peaks = [usage["peak_mib"] for usage in usage_by_size.values()]
        yield Measurement(
            "  episodes a second of a core", large / usage_by_size[sizes[-1]]["cpu_s"], "1/s"
        )
        for (episodes, num_questions), peak in zip(usage_by_size, peaks, strict=True):
            yield Measurement(f"  peak memory, {episodes:,} of {num_questions:,}", peak, "MiB")
        a_question = (peaks[1] - peaks[0]) * 2**20 / (sizes[1][1] - sizes[0][1])
        yield Measurement("  of it a question more", a_question, "bytes")
        an_episode = (peaks[2] - peaks[1]) * 2**20 / (large - small)
        max_bytes = None if quick else MOST_BYTES
        yield Measurement("  of it an episode more", an_episode, "bytes", at_most=max_bytes)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _measure(command: str, store: Path) -> dict[str, Any]:
    return in_own_process(measure_command, command, str(store), COMMANDS[command])


if __name__ == "__main__":
    run("curation", __doc__, questions)
