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
from torch.nn.functional import linear, pad

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
            return multiply_rows(x, self.weight, self.bias)
        product: Tensor = LinearProduct.apply(x, self.weight, self.bias)
        return product


class LinearProduct(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + b and its gradients, each a product of oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return multiply_rows(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        gradient_RN = gradients[0].reshape(-1, weight_NK.shape[0])
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = multiply_rows(gradient_RN, weight_NK.t(), None).view(x.shape)
        if ctx.needs_input_grad[1]:
            by_weight = _weight_gradient(gradient_RN, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            by_bias = gradient_RN.sum(0)
        return by_x, by_weight, by_bias


def multiply_rows(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return x W^T + bias, [..., N], of x [..., K], by products of few sizes.

    oneDNN compiles a kernel for each number of rows and keeps a thousand: some milliseconds and
    half a MiB for each product of a model. So rows of zeros round the number up.
    """
    outputs, inputs = weight_NK.shape
    x_RK = x.reshape(-1, inputs)
    rows = len(x_RK)
    if inputs <= outputs or rows <= _PACKED_ROWS:
        product_RN = multiply(_rounded_up(x_RK), weight_NK, bias_N)
    else:  # a copy of the product is smaller than one of x
        parts = [
            multiply(_rounded_up(part), weight_NK, bias_N) for part in x_RK.split(_PACKED_ROWS)
        ]
        product_RN = torch.cat([*parts[:-1], parts[-1][: rows % _PACKED_ROWS or None]])
    return _without_padding(product_RN, torch.Size([*x.shape[:-1], outputs]))


def _without_padding(product_RN: Tensor, shape: torch.Size) -> Tensor:
    """Return the first rows of a contiguous product in this shape, in the same memory.

    The result is no view: some models change a layer's output in place, which autograd does not
    allow with a view that a function of ours returns.
    """
    strides = torch.empty(shape, device="meta").stride()
    storage = product_RN.untyped_storage()
    return product_RN.new_empty(0).set_(storage, product_RN.storage_offset(), shape, strides)


def _rounded_up(x_RK: Tensor) -> Tensor:
    """Return x with rows of zeros at its end, up to a number of rows that others have, too."""
    padding = rounded_up(len(x_RK)) - len(x_RK)
    return pad(x_RK, (0, 0, 0, padding)) if padding else x_RK


def rounded_up(rows: int) -> int:
    """Return a number that is larger by less than 16, or by at most a sixteenth.

    Of the numbers up to 16,384 it returns 112.
    """
    step = max(16, 1 << (rows - 1).bit_length() >> 5)
    return -(-rows // step) * step


def _weight_gradient(gradient_RN: Tensor, x_RK: Tensor) -> Tensor:
    """Return the gradient by the weight, [N, K].

    oneDNN packs the second factor, which is faster if that is the larger one. It packs some rows at
    a time, so that the gradient by the logits is never held twice.
    """
    is_wide = x_RK.shape[1] >= gradient_RN.shape[1]
    total: Tensor | None = None
    for g_rN, x_rK in zip(gradient_RN.split(_PACKED_ROWS), x_RK.split(_PACKED_ROWS), strict=True):
        g_rN, x_rK = _rounded_up(g_rN), _rounded_up(x_rK)
        factors = (g_rN.t(), x_rK.t()) if is_wide else (x_rK.t(), g_rN.t())
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
