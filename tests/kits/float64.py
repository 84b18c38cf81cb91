"""Runs models in float64, so that two ways to compute a number agree to many digits everywhere.

In float32, two orders of summation differ by an amount that depends on the processor. In float64
the same difference is a billion times smaller, so any remaining difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

M = TypeVar("M", bound=nn.Module)

#: How far two sums of a small model may lie apart in float64: its epsilon is 2.2e-16, and models
#: of a few layers were seen to amplify it by less than 1e4.
CLOSE = 1e-9


@contextmanager
def float64() -> Iterator[None]:
    """Keep float64 tensors from being cast to float32 within the block, in all threads.

    Models cast to float32 where half precision is not exact enough (norms, softmax, logits). In a
    float64 model the same cast would lose half the digits.
    """
    single = Tensor.float

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def in_float64(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.float64:
                args = tuple(
                    torch.float64 if argument is torch.float32 else argument for argument in args
                )
                if kwargs.get("dtype") is torch.float32:
                    kwargs["dtype"] = torch.float64
            return function(tensor, *args, **kwargs)

        return in_float64

    def kept_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else single(tensor, *args, **kwargs)

    with (
        patch.object(Tensor, "float", kept_float),
        patch.object(Tensor, "to", keeping(Tensor.to)),
        patch.object(functional, "softmax", keeping(functional.softmax)),
    ):
        yield


def doubled(model: M) -> M:
    """Return the model with its weights in float64.

    Its buffers stay: a rotary embedding's frequencies are multiplied by positions in float32.
    """
    for weight in model.parameters():
        weight.data = weight.data.double()
    return model
