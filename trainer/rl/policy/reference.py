"""The frozen reference model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from scorekit.matmul import MatmulSetting
from trainer.rl.config import PolicyConfig
from trainer.rl.matmul import use_onednn
from trainer.rl.policy.models import load_model


class Reference:
    """The frozen reference model: `reference_path`, or the policy at the start.

    The latter is the policy without its adapters, or a copy if every weight is trained.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        policy: nn.Module,
        device: torch.device,
        shard: Callable[[nn.Module], None] | None = None,
        *,
        matmul: MatmulSetting = "torch",
    ) -> None:
        """Load the reference, or copy or share `policy`, which is not trained or distributed yet.
        shard: distributes a model, if the processes share the weights. matmul: who multiplies.
        """
        self._adapted: Any = None
        if cfg.reference_path is not None:
            model = load_model(cfg, cfg.reference_path, None, "policy.reference_path", device)
            if matmul == "onednn":
                use_onednn(model)
        elif cfg.lora.r:
            self._adapted = policy
            return
        else:
            model = copy.deepcopy(policy)
        self._model = model.requires_grad_(False).eval()
        if shard is not None:
            shard(self._model)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the model that gives the reference's log-probabilities."""
        if self._adapted is None:
            yield self._model
            return
        with self._adapted.disable_adapter():
            yield self._adapted
