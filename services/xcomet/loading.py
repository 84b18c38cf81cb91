"""Build the networks of a checkpoint without holding its weights twice.

Imported only to load a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scorekit.errors import UserError
from services.xcomet.checkpoint import Checkpoint, read_checkpoint
from services.xcomet.classes import hyper_parameters
from services.xcomet.comet_model import CometBase, sentence_layer
from services.xcomet.joint import Unified, XComet
from services.xcomet.networks import Metric
from services.xcomet.pooled import Ranking, Referenceless, Regression
from services.xcomet.upstream import build as build_upstream

_CLASSES: dict[str, Callable[[Any, torch.device], CometBase]] = {
    "regression_metric": Regression,
    "referenceless_regression_metric": Referenceless,
    "ranking_metric": Ranking,
    "unified_metric": Unified,
    "xcomet_metric": XComet,
}


def load_comet(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, implementation: str
) -> CometBase:
    """Return the loaded checkpoint, ready to score. Arguments and errors as `load_metric`."""
    metric = load_metric(checkpoint, device, dtype, implementation)
    return _CLASSES[checkpoint.kind](metric, device)


def load_metric(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    implementation: str = "own",
) -> Any:
    """Return the networks of a checkpoint on the device: the encoder in `dtype`, the rest in
    float32.

    The file is memory-mapped, and each weight is copied once, in its final dtype.

    implementation: own (`networks.Metric`) or unbabel-comet (its class). Raises UserError if the
    checkpoint and its encoder's files do not fit.
    """
    stored = read_checkpoint(checkpoint.file)
    metric = _build(checkpoint, stored["hyper_parameters"], implementation)
    shapes = {name: weight.shape for name, weight in metric.state_dict().items()}
    weights = {
        # A copy: the file may be replaced while the service runs. One of another shape is refused
        # below; it may claim to be larger than its file.
        name: tensor.to(device, dtype if name.startswith("encoder.") else torch.float32, copy=True)
        if tensor.shape == shapes[name]
        else tensor
        for name, tensor in stored["state_dict"].items()
        if name in shapes  # older checkpoints also hold position ids
    }
    try:
        metric.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # sizes differ
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{checkpoint.file}: does not fit its encoder's config: {reason}") from None
    _check(checkpoint, metric)
    _fill_buffers(metric)
    metric.to(device)  # buffers, such as positions
    return metric.eval()


def _build(checkpoint: Checkpoint, stored: dict[str, Any], implementation: str) -> Any:
    """Return the networks with uninitialized weights."""
    overrides = {
        "pretrained_model": checkpoint.encoder,
        "encoder_model": checkpoint.encoder_model,
        "layer_transformation": checkpoint.layer_transformation,
    }
    try:
        if implementation == "unbabel-comet":
            return build_upstream(checkpoint, stored, overrides)
        hparams = hyper_parameters(checkpoint.kind, stored) | overrides
        with torch.device("meta"):
            return Metric(checkpoint.kind, hparams, local=checkpoint.encoder_is_local)
    except UserError:
        raise
    except OSError:  # raised by transformers: offline, or no such repository
        raise UserError(
            f"encoder {checkpoint.encoder}: its config and tokenizer are not on this machine and "
            "cannot be fetched from the hub. Give --encoder a local folder"
        ) from None
    except Exception as error:  # wrong settings can make transformers and torch fail in any way
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UserError(
            f"{checkpoint.file}: its hyper-parameters, or config and tokenizer of encoder "
            f"{checkpoint.encoder}, do not fit a {checkpoint.kind}: {reason}"
        ) from error


def _fill_buffers(metric: Any) -> None:
    """Fill the buffers that a checkpoint need not contain: positions, token types, and buffers of
    the training's dropout."""
    for module in metric.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                continue
            filled = torch.zeros(buffer.shape, dtype=buffer.dtype)
            if name == "position_ids":  # [1, P]
                filled += torch.arange(buffer.shape[1], dtype=buffer.dtype)
            elif name not in ("token_type_ids", "dropout_mask", "dropout_fill"):
                raise NotImplementedError(f"the buffer {name} of {type(module).__name__}")
            setattr(module, name, filled)


def _check(checkpoint: Checkpoint, metric: Any) -> None:
    """Raise UserError if a weight or layer that the score needs is missing."""
    used = ("encoder.", "estimator.", "hidden2tag.", "layerwise_attention.")
    required = {k for k in metric.state_dict() if k.startswith(used) and ".dropout_" not in k}
    missing = sorted(required - checkpoint.keys)
    if missing:
        raise UserError(
            f"{checkpoint.file}: {len(missing)} weights are missing, the first is {missing[0]}"
        )
    rows = metric.encoder.model.get_input_embeddings().num_embeddings
    if len(metric.encoder.tokenizer) > rows:  # an id without a row crashes the process on a GPU
        raise UserError(
            f"encoder {checkpoint.encoder}: its tokenizer has {len(metric.encoder.tokenizer)} ids, "
            f"but the weights have {rows} rows. Give --encoder the right folder"
        )
    layers = metric.encoder.num_layers
    layer_by_name = {
        "sent_layer" if "sent_layer" in metric.hparams else "layer": sentence_layer(metric)
    }
    if getattr(metric, "word_level", False):
        layer_by_name["word_layer"] = metric.hparams["word_layer"]
    for name, layer in layer_by_name.items():
        if layer not in range(layers) and (layer != "mix" or name == "word_layer"):
            raise UserError(f"{checkpoint.file}: {name} is {layer!r}, of layers 0..{layers - 1}")
