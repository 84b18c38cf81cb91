"""Gradient checkpointing of a policy that stays in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scorekit.errors import UserError


def checkpoint_layers(model: nn.Module) -> None:
    """Let each layer keep only its input for the gradient, and compute the rest again (arXiv
    1604.06174).

    Transformers' own switch acts in train mode alone, where dropout would act, too.
    Raises UserError where the model has no layers that can.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"policy.gradient_checkpointing: a {type(model).__name__} cannot do it")
    for layer in layers:
        layer.forward = partial(_twice, layer.forward)


def _twice(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # sampling, with its cache
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
