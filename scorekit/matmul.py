"""Choose who multiplies float32 matrices on a CPU: torch's own kernels, or oneDNN with packed
weights.

torch gives float32 products to MKL, which runs its AVX2 kernels on AMD processors. oneDNN is part
of torch, too, and uses AVX-512 where a processor has it. Its weights must be packed in its own
layout first, which pays where they never change: in a model that only scores.

The operators are private to torch. They are tried before they are used: against float64, because
another oneDNN or another processor might round to bfloat16, and against torch's time. No global
setting of torch changes, so a scorer may stand in somebody else's process.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from scorekit.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: The environment variable of all services, and of scorers in another process.
VARIABLE = "SCOREKIT_MATMUL"
MatmulSetting = Literal["auto", "torch", "onednn"]
MatmulChoice = Literal["torch", "onednn"]
#: How many times torch's rate the packed products must reach in `auto`.
MIN_TIMES_FASTER = 1.3
#: Largest error of a product with a standard deviation of 1. float32 has 1e-6 to 4e-6, TF32 5e-4.
MAX_ERROR = 2e-5
#: Rows, inputs and outputs of the products that are tried, as medium models have them.
_SHAPES = ((64, 512, 2048), (256, 512, 512), (128, 1024, 1024))
#: The fastest of so many runs counts: whatever else runs on the machine only slows a run down.
_RUNS = 7
#: Seconds of the runs of a shape, after which no other one begins: threads wait for each other on a
#: busy machine.
_RUNS_S = 0.1
_CHECKED_ROWS = 8
#: Rows for which oneDNN chooses the layout of packed weights: the tokens of a batch on a CPU. All
#: other numbers of rows use the same layout, so a row's result does not depend on its batch.
_ROWS = 256
#: transformers' modules that call a linear layer and at once an activation, by the names of all
#: their parts: the names of these two.
_ACTIVATED = {
    frozenset({"dense", "intermediate_act_fn"}): ("dense", "intermediate_act_fn"),
    frozenset({"wi_0", "wi_1", "wo", "dropout", "act"}): ("wi_0", "act"),
}
#: transformers' forms of GELU: the formula's name in torch, which is oneDNN's name, too.
_GELUS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds what packed products gave on this machine.

    times_faster: median over the shapes of torch's time through first.
    error: their largest one against float64.
    problem: why they cannot be used at all, or None.
    """

    times_faster: float = 0.0
    error: float = 0.0
    problem: str | None = None


def resolve_matmul(
    setting: str | None,
    device: torch.device,
    dtype_name: str,
    *,
    key: str = "--matmul",
    run_trial: Callable[[int], Trial] | None = None,
) -> MatmulChoice:
    """Return who multiplies for a model on this device, with weights of this dtype.

    setting: auto, torch or onednn; None: what SCOREKIT_MATMUL says, else auto. Call it once the
    number of threads is set: `auto` measures with it.
    key: the user's name of the setting.
    run_trial: returns what oneDNN gives with so many threads; None: `try_packed`.
    Raises UserError if onednn is asked for and cannot be used.
    """
    source = _source(setting, key)
    setting = check_matmul(setting, dtype_name, key)
    if setting == "onednn" and device.type != "cpu":
        device_key = key.replace("matmul", "device")
        raise UserError(f"{source} onednn: it is for a CPU, and {device_key} is {device}; say auto")
    if setting == "torch" or device.type != "cpu" or dtype_name != "float32":
        return "torch"
    import torch

    trial = (run_trial or try_packed)(torch.get_num_threads())
    if setting == "onednn" and trial.problem:
        raise UserError(f"{source} onednn: {trial.problem}; say auto or torch")
    is_faster = not trial.problem and trial.times_faster >= MIN_TIMES_FASTER
    choice: MatmulChoice = "onednn" if setting == "onednn" or is_faster else "torch"
    result = trial.problem or (
        f"oneDNN has {trial.times_faster:.2f} times torch's rate, "
        f"the largest error is {trial.error:.1e}"
    )
    log.info("matmul: %s, of %s %s: %s", choice, source, setting, result)
    return choice


def check_matmul(setting: str | None, dtype_name: str, key: str = "--matmul") -> str:
    """Return the setting, from SCOREKIT_MATMUL if it is None. Imports no torch.

    Raises UserError if it is none of the three, or if it is onednn for another dtype than float32.
    """
    source = _source(setting, key)
    if setting is None:
        setting = os.environ.get(VARIABLE) or "auto"
    if setting not in get_args(MatmulSetting):
        raise UserError(f"{source} {setting}: give auto, torch or onednn")
    if setting == "onednn" and dtype_name != "float32":
        dtype_key = key.replace("matmul", "dtype")
        raise UserError(
            f"{source} onednn: it is for float32, and {dtype_key} is {dtype_name}; say auto"
        )
    return setting


def _source(setting: str | None, key: str) -> str:
    """Return the name of what the setting comes from, for messages."""
    return VARIABLE if setting is None and os.environ.get(VARIABLE) else key


@cache
def try_packed(threads: int) -> Trial:
    """Return what packed products give with so many threads: some tenths of a second, once.

    The random numbers are those of a generator of its own.
    """
    import torch

    with torch.inference_mode():
        return trial_of(_try_shape, _SHAPES)


def trial_of(
    try_shape: Callable[[tuple[int, int, int], torch.Generator], tuple[float, float]],
    shapes: Sequence[tuple[int, int, int]],
) -> Trial:
    """Return the result of a trial over shapes: rows, inputs and outputs of a product.

    try_shape: returns torch's time through the other one, and the largest error.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    try:
        results = [try_shape(shape, generator) for shape in shapes]
    except (AttributeError, RuntimeError, TypeError) as failure:
        reason = str(failure).split("\n")[0]
        return Trial(problem=f"torch {torch.__version__} has no packed products here: {reason}")
    ratios, errors = zip(*results, strict=True)
    problem = None
    if not all(error <= MAX_ERROR for error in errors):  # also where it is not a number
        problem = f"packed products are not float32 here, with an error of {max(errors):.1e}"
    return Trial(statistics.median(ratios), max(errors), problem)


def _try_shape(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[float, float]:
    """Return torch's time through that of packed products, and their largest error."""
    import torch
    from torch.nn.functional import linear

    rows, inputs, outputs = shape
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    bias = torch.randn(outputs, generator=generator)
    packed = pack(weight)
    exact = linear(x[:_CHECKED_ROWS].double(), weight.double(), bias.double())
    error = float((multiply(x, packed, bias)[:_CHECKED_ROWS] - exact).abs().max())
    return times_faster(lambda: linear(x, weight, bias), lambda: multiply(x, packed, bias)), error


def times_faster(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Return the time of the first function through that of the second, which has run before."""
    first()
    first_seconds: list[float] = []
    seconds: list[float] = []
    begin = time.perf_counter()
    while not seconds or (len(seconds) < _RUNS and time.perf_counter() < begin + _RUNS_S):
        start = time.perf_counter()  # in turn: both meet the same load of the machine
        first()
        middle = time.perf_counter()
        second()
        first_seconds.append(middle - start)
        seconds.append(time.perf_counter() - middle)
    return min(first_seconds) / min(seconds)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] in oneDNN's layout. `to_dense()` of it gives the same numbers."""
    import torch

    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, gelu: str | None = None
) -> torch.Tensor:
    """Return x W^T + bias, [..., out], of x [..., in] and W, packed or dense. It has no gradient.

    A dense W is packed within the call, which costs little where x has many rows.
    gelu: apply this formula of GELU (none or tanh, as torch calls them); None: apply nothing.
    """
    import torch

    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, packed, bias, "none" if gelu is None else "gelu", [], gelu or ""
    )
    return product


def pack_linear_layers(network: torch.nn.Module) -> int:
    """Replace the linear layers within a network by packed ones; return how many.

    Only float32 layers on a CPU. Their dense weights are freed one by one, so the memory does not
    grow. These stay: layers with hooks, weights that two modules share, and the layers of torch's
    attention and transformer modules, which use their weights without calling them. oneDNN also
    computes a GELU that follows a layer at once, while the product is in the caches.
    """
    modules = list(network.modules())
    users = Counter(
        id(parameter) for module in modules for parameter in module.parameters(recurse=False)
    )
    packed_layers: dict[int, torch.nn.Module] = {}  # one layer may stand in several modules
    for parent in modules:
        if _uses_weights_of_children(parent):
            continue
        for name, layer in list(parent.named_children()):
            if id(layer) not in packed_layers and _can_be_packed(layer, users):
                packed_layers[id(layer)] = _packed_linear_type()(layer)
                del layer.weight  # `modules` still has the layer
            if id(layer) in packed_layers:
                setattr(parent, name, packed_layers[id(layer)])
    _join_activations(network, packed_layers)
    return len(packed_layers)


def _join_activations(
    network: torch.nn.Module, packed_layers: Mapping[int, torch.nn.Module]
) -> None:
    """Give a GELU to the packed layer before it, in transformers' modules that call both."""
    import torch

    packed = set(packed_layers.values())
    parents = Counter(child for module in network.modules() for child in module.children())
    for module in network.modules():
        names = _ACTIVATED.get(frozenset(name for name, _ in module.named_children()))
        if names is None or not type(module).__module__.startswith("transformers.models."):
            continue
        layer, activation = (getattr(module, name) for name in names)
        formula = _GELUS.get(type(activation).__name__)
        if layer in packed and parents[layer] == 1 and formula and not _has_hooks(activation):
            layer.gelu = formula
            setattr(module, names[1], torch.nn.Identity())


def _uses_weights_of_children(module: torch.nn.Module) -> bool:
    origin = type(module).__module__
    return origin.startswith("torch.nn.") and origin != "torch.nn.modules.container"


def _can_be_packed(layer: torch.nn.Module, users: Counter[int]) -> bool:
    import torch

    return (
        type(layer) is torch.nn.Linear  # a layer of LoRA or a quantized one is a class of its own
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
        and users[id(layer.weight)] == 1
        and not _has_hooks(layer)
    )


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@cache
def _packed_linear_type() -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """Return the class of the packed layers: a function, so that torch is imported when needed."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu, linear

    class PackedLinear(nn.Module):  # type: ignore[misc]
        """A linear layer with a packed weight, for inference.

        gelu: its activation; None: none.

        With gradients, autocast or another dtype it computes as nn.Linear does, with the weight
        unpacked for each call: right, but slow.
        """

        #: T5 looks at the dtype of a layer's weight, if it has one.
        weight = None

        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = layer.in_features, layer.out_features
            self.bias = layer.bias
            self.gelu: str | None = None
            self._packed = pack(layer.weight)
            self.train(layer.training)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return [..., out] of x [..., in]."""
            if (
                x.dtype == torch.float32
                and not (torch.is_grad_enabled() and x.requires_grad)
                and not torch.is_autocast_enabled("cpu")
            ):
                return multiply(x, self._packed, self.bias, self.gelu)
            product = linear(x, self._packed.to_dense(), self.bias)
            return product if self.gelu is None else gelu(product, approximate=self.gelu)

        def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
            """Return a copy with the same packed weight, which never changes."""
            clone = memo[id(self)] = type(self).__new__(type(self))
            memo[id(self._packed)] = self._packed  # torch cannot copy its layout
            clone.__dict__ = deepcopy(self.__dict__, memo)
            return clone

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            """Add the dense weight, as nn.Linear does. To load it again needs an nn.Linear."""
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = self._packed.to_dense()

        def extra_repr(self) -> str:
            """Return the sizes, as nn.Linear does."""
            sizes = f"in_features={self.in_features}, out_features={self.out_features}"
            return sizes if self.gelu is None else f"{sizes}, gelu={self.gelu}"

    return PackedLinear
