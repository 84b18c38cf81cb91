"""Multiply by oneDNN's float32 kernels where weights are trained, forward and backward.

A linear layer may use them if a trial at the start says so (scorekit/matmul.py). The weights stay
dense, because they change with each step: oneDNN packs them within a call, which costs little from
`_MIN_ROWS` rows up. No global setting of torch changes.
Shapes: R rows (all tokens of a batch), K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from scorekit.matmul import Trial, multiply, times_faster, trial_of

#: With fewer rows, or fewer inputs or outputs (the adapters of LoRA), torch's own kernels are as
#: fast, or faster.
_MIN_ROWS = 16
_MIN_SIZE = 64
#: Rows of which the gradient by a weight is computed at a time.
_PACKED_ROWS = 1024
#: Rows, inputs and outputs of the products that are tried, forward and backward.
_SHAPES = ((256, 256, 1024), (512, 512, 512), (1024, 512, 256))


def use_onednn(model: nn.Module) -> int:
    """Let the linear layers of a model multiply by oneDNN; return how many.

    Their weights and names stay as they are; a copy of the model computes in the same way.
    """
    layers = [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear and min(layer.in_features, layer.out_features) >= _MIN_SIZE
    ]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    return len(layers)


class OneDnnLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer whose float32 products are oneDNN's, with gradients.

    Few rows, other data types, other devices and autocast take torch's way.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of x [..., K]."""
        if (
            x.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or x.device.type != "cpu"
            or x.numel() < _MIN_ROWS * self.in_features
            or torch.is_autocast_enabled("cpu")
        ):
            return linear(x, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return multiply(x, self.weight, self.bias)
        product: Tensor = LinearProduct.apply(x, self.weight, self.bias)
        return product


class LinearProduct(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + b and its gradients, each a product of oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return multiply(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        gradient_RN = gradients[0].reshape(-1, weight_NK.shape[0])
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = multiply(gradient_RN, weight_NK.t(), None).view(x.shape)
        if ctx.needs_input_grad[1]:
            by_weight = _weight_gradient(gradient_RN, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            by_bias = gradient_RN.sum(0)
        return by_x, by_weight, by_bias


def _weight_gradient(gradient_RN: Tensor, x_RK: Tensor) -> Tensor:
    """Return the gradient by the weight, [N, K].

    oneDNN packs the second factor, which is faster if that is the larger one. It packs some rows at
    a time, so that the gradient by the logits is never held twice.
    """
    is_wide = x_RK.shape[1] >= gradient_RN.shape[1]
    total: Tensor | None = None
    for g_RN, x_rK in zip(gradient_RN.split(_PACKED_ROWS), x_RK.split(_PACKED_ROWS), strict=True):
        factors = (g_RN.t(), x_rK.t()) if is_wide else (x_rK.t(), g_RN.t())
        part = multiply(*factors, None)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total if is_wide else total.t()


@cache
def try_onednn(threads: int) -> Trial:
    """Return what products with gradients give with so many threads: some tenths of a second, once.

    The random numbers are those of a generator of its own.
    """
    with torch.enable_grad():
        return trial_of(_try_shape, _SHAPES)


def _try_shape(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[float, float]:
    """Return torch's time through oneDNN's, forward and backward, and its largest error.

    The error is that of products with a standard deviation of 1.
    """
    rows, inputs, outputs = shape
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    bias = torch.randn(outputs, generator=generator)
    gradient = torch.randn(rows, outputs, generator=generator)
    deviations = (1.0, (outputs / inputs) ** 0.5, rows**0.5, rows**0.5)

    def results(product: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        parts = [part.to(dtype).requires_grad_() for part in (x, weight, bias)]
        result = product(*parts)
        return (result, *torch.autograd.grad(result, parts, gradient.to(dtype)))

    exact = results(linear, torch.float64)
    error = max(
        float((result.detach() - expected.detach()).abs().max()) / deviation
        for result, expected, deviation in zip(
            results(LinearProduct.apply), exact, deviations, strict=True
        )
    )
    return times_faster(lambda: results(linear), lambda: results(LinearProduct.apply)), error
