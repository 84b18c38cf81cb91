"""Runs `python -m trainer` in processes that share the weights as in sharded_trainer.py."""

from __future__ import annotations

from unittest.mock import patch

import trainer.translation.evaluation.run
from tests.kits.trainer.ranks.sharded_trainer import ShardedWorld
from trainer.__main__ import app

if __name__ == "__main__":
    with patch.object(trainer.translation.evaluation.run, "DistributedContext", ShardedWorld):
        app()
