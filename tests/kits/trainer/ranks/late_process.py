"""Processes the last of which stops in an exchange after the barrier: the others report it.

torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.late_process [--end]

--end: the last one ends there.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import distributed

from trainer.rl.distributed import DistributedContext

if __name__ == "__main__":
    world = DistributedContext(torch.device("cpu"), patience_s=2)
    with world.monitored():
        world.set_phase(f"update {7 + world.rank}, learning")
        world.barrier()
        if "--end" in sys.argv and world.rank:
            os._exit(0)
        time.sleep(60 * world.rank)
        distributed.all_reduce(torch.ones(1))
