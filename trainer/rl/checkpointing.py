"""Gradient checkpointing for a policy that stays in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scorekit.errors import UserError


def checkpoint_layers(model: nn.Module) -> None:
    """Let each layer store only its input, and recompute the rest (arXiv 1604.06174).

    Transformers' own switch works in train mode only, where dropout would be active too.
    Raises UserError if the model has no layers that support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"policy.gradient_checkpointing: {type(model).__name__} does not support it. Set it to "
            "false"
        )
    for layer in layers:
        layer.forward = partial(_forward_with_recompute, layer.forward)


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # sampling, with its cache
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
