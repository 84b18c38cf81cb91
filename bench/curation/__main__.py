"""What do the commands of curation take of a store of 20,000 episodes, and of 200,000?

Each command reads the same store, which is written once (bench/curation/written.py), in a process
of its own: seconds of the whole command, and the most memory that the process ever held. What
grows with the store is a line of figures an episode; an episode itself has 62 kB.

    python -m bench.curation [--quick]
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import WORK, Figure, run
from bench.curation.taken import taken
from bench.curation.written import write_store

FOLDER = WORK / "curation"
#: Command and its flags.
COMMANDS: dict[str, tuple[str, ...]] = {
    "buckets": (),
    "focus": ("--set", "focus.hard_a=0.3"),
    "budget": (),
    "distill": ("--set", "distill.repeats=mask"),
}
#: Most that an episode may add to what a command holds.
MOST_BYTES = 2_500


def questions(quick: bool) -> Iterator[Figure]:
    """All figures of this script."""
    sizes = (400, 4_000) if quick else (20_000, 200_000)
    shutil.rmtree(FOLDER, ignore_errors=True)
    stores = {}
    for size in sizes:
        began = time.perf_counter()
        stores[size] = write_store(FOLDER / f"run-{size}", size)
        packed = sum(path.stat().st_size for path in stores[size].rglob("*.gz"))
        yield Figure(
            f"a store of {size:,} episodes is written in",
            time.perf_counter() - began,
            "s",
            details={"mib": packed / 2**20},
        )
    for command in COMMANDS:
        found = {size: _measured(command, store) for size, store in stores.items()}
        small, large = found.values()
        for size, told in found.items():
            yield Figure(f"{command}, {size:,} episodes", told["wall_s"], "s", details=told)
        yield Figure("  episodes a second of a core", sizes[1] / large["cpu_s"], "1/s")
        for told in (small, large):
            yield Figure(f"  peak memory, {told['episodes']:,}", told["peak_mib"], "MiB")
        grown = (large["peak_mib"] - small["peak_mib"]) * 2**20 / (sizes[1] - sizes[0])
        most = None if quick else MOST_BYTES
        yield Figure("  of it an episode more", grown, "bytes", at_most=most)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _measured(command: str, store: Path) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(taken, (command, str(store), COMMANDS[command]))


if __name__ == "__main__":
    run("curation", __doc__, questions)
