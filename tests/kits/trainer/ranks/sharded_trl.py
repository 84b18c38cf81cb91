"""The trainer's command with TRL's weights sharded (FSDP2) on CPUs.

accelerate shards on accelerators only; this makes it take the same path here.

    torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.sharded_trl train --config FILE
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState

#: The environment that `accelerate launch` makes of configs/accelerate/fsdp2.yaml.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}


def shard_on_cpus() -> None:
    """Make accelerate shard in this process, if its environment says so."""
    plain = AcceleratorState.__init__

    def state(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if getattr(self, "fsdp_plugin", None) is not None:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = state


if __name__ == "__main__":
    os.environ.update(FSDP2)
    shard_on_cpus()
    from trainer.__main__ import app

    app()
