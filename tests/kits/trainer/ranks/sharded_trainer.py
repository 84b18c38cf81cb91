"""Runs of the trainer in the processes of one start, also with weights that they share.

accelerate shards on accelerators only, so this does on a CPU what it would do there.

    torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.sharded_trainer CONFIG whole|sharded \
        KEY=VALUE,... ...

For each list of overrides a run in `run_dir`-NUMBER of the config.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import yaml
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

import trainer.runs.learner
import trainer.runs.open
import trainer.search.training.train
import trainer.translation.train
from scorekit.config import load_config
from trainer.rl.distributed import DistributedContext
from trainer.rl.policy import Reference
from trainer.search.config import SearchConfig
from trainer.search.data import load_train
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples


class ShardedWorld(DistributedContext):
    """A world in which no process has all weights."""

    @property
    def is_sharded(self) -> bool:
        return True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._prepared = self.accelerator.prepare
        self.accelerator.prepare = self._as_on_accelerators
        self.accelerator.state.fsdp_plugin = SimpleNamespace(ignored_modules=None)

    def _as_on_accelerators(self, model: Any, optimizer: Any) -> tuple[nn.Module, Any]:
        left = self.accelerator.state.fsdp_plugin.ignored_modules
        full_parameters = get_parameters_from_modules(left, model, self.device)
        for part in model.modules():  # as accelerate does: each layer, then what is left
            if isinstance(part, GradientCheckpointingLayer):
                fully_shard(part, ignored_params=full_parameters)
        fully_shard(model, ignored_params=full_parameters)
        learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
        options = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
        remade = type(getattr(optimizer, "optimizer", optimizer))(learns, **options)
        return model, self._prepared(remade)


class WatchedReference(Reference):
    """A reference that prints how many of its weights this process has between two passes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._adapted is None:
            self.print_share()

    def print_share(self) -> None:
        parts = [(p.numel(), p.to_local().numel()) for p in self._model.parameters()]
        total, local = map(sum, zip(*parts, strict=True))
        print(f"reference: {local} of {total} weights here", flush=True)


def main(path: str, weights: str, *runs: str) -> None:
    """Run the trainer for each list of overrides."""
    with ExitStack() as patches:
        if weights == "sharded":
            patches.enter_context(
                patch.object(trainer.runs.open, "DistributedContext", ShardedWorld)
            )
            patches.enter_context(patch.object(trainer.runs.learner, "Reference", WatchedReference))
        _run_each(path, runs)


def _run_each(path: str, runs: tuple[str, ...]) -> None:
    searches = yaml.safe_load(Path(path).read_text(encoding="utf-8")).get("task") == "search"
    for number, overrides in enumerate(runs):
        config_class: Any = SearchConfig if searches else TranslationConfig
        cfg = load_config(config_class, Path(path), overrides.split(","))
        misc = cfg.misc.model_copy(update={"run_dir": f"{cfg.misc.run_dir}-{number}"})
        cfg = cfg.model_copy(update={"misc": misc})
        if searches:
            trainer.search.training.train.run_search(load_train(cfg), {}, cfg)
            continue
        train, held_out = (load_examples(str(source)) for source in (cfg.data.train, cfg.data.eval))
        trainer.translation.train.train_translation(train, held_out, cfg)


if __name__ == "__main__":
    main(*sys.argv[1:])
