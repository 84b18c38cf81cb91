"""Processes that exchange in several threads at once, each thread through a fork of its own.

torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.threads_of_ranks FOLDER [--error]

Each thread gathers numbers that say which thread, process and round they are from, while the main
thread sums gradients. --error: the last process raises in the middle; threads of the others that
wait for it have to end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import distributed

from trainer.rl.barrier import ProcessStalled
from trainer.rl.distributed import DistributedContext

THREADS, ROUNDS = 3, 40


def gather_rounds(world: DistributedContext, number: int) -> int:
    """Gather in rounds of random length, and return how many were right."""
    moments, right = random.Random(10 * number + world.rank), 0
    for round_number in range(ROUNDS):
        time.sleep(moments.uniform(0, 0.003))
        world.set_phase(f"thread {number}, round {round_number}")
        gathered = world.gather([(number, world.rank, round_number)])
        right += gathered == [(number, rank, round_number) for rank in range(world.size)]
    return right


def main(folder: Path, *, with_error: bool) -> None:
    """Run the threads, and write what each process has seen."""
    world = DistributedContext(torch.device("cpu"), patience_s=60)
    with world.monitored():
        forks = [world.fork(f"thread {number}") for number in range(THREADS)]
        threads = ThreadPoolExecutor(THREADS)
        futures = [threads.submit(gather_rounds, fork, i) for i, fork in enumerate(forks)]
        sums = []
        for value in range(ROUNDS):
            if with_error and value == ROUNDS // 2 and world.rank == world.size - 1:
                raise ZeroDivisionError("in the middle")
            total = torch.tensor([float(value)])
            world.barrier()
            distributed.all_reduce(total)
            sums.append(total.item())
        right = [future.result() for future in futures]
        try:
            forks[0].close()
            forks[0].gather([1])
            closed = ""
        except ProcessStalled as error:
            closed = type(error).__name__
        result = {"sums": sums, "right": right, "closed": closed, "joined": world.gather([1])}
        (folder / f"{world.rank}.json").write_text(json.dumps(result))
        threads.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_error="--error" in sys.argv)
