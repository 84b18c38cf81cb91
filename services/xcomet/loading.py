"""Building the networks of a checkpoint, without holding its weights twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from services.xcomet import upstream
from services.xcomet.checkpoint import Checkpoint, read_checkpoint
from services.xcomet.classes import hyper_parameters
from services.xcomet.layers import sentence_layer

if TYPE_CHECKING:
    import torch


def load_metric(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    implementation: str = "own",
) -> Any:
    """Return the networks of a checkpoint for inference, on the device: the encoder in `dtype`, the
    rest in float32. The file is mapped, and each weight of it goes to its place in its dtype.

    implementation: own (`networks.Metric`) or unbabel-comet (its class). Raises UserError where the
    checkpoint and its encoder's files do not fit.
    """
    import torch

    stored = read_checkpoint(checkpoint.file)
    metric = _build(checkpoint, stored["hyper_parameters"], implementation)
    wanted = metric.state_dict().keys()
    weights = {
        name: tensor.to(  # a copy: the file may be replaced while the service runs
            device, dtype if name.startswith("encoder.") else torch.float32, copy=True
        )
        for name, tensor in stored["state_dict"].items()
        if name in wanted  # older checkpoints also hold position ids
    }
    try:
        metric.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # sizes differ
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{checkpoint.file}: does not fit its encoder's config: {reason}") from None
    _check(checkpoint, metric)
    _fill_buffers(metric)
    metric.to(device)  # what is no weight, such as positions
    return metric.eval()


def _build(checkpoint: Checkpoint, stored: dict[str, Any], implementation: str) -> Any:
    """Return the networks without numbers in their weights."""
    import torch

    changed = {
        "pretrained_model": checkpoint.encoder,
        "encoder_model": checkpoint.encoder_model,
        "layer_transformation": checkpoint.layer_transformation,
    }
    try:
        if implementation == "unbabel-comet":
            return upstream.build(checkpoint, stored, changed)
        from services.xcomet.networks import Metric

        hparams = hyper_parameters(checkpoint.kind, stored) | changed
        with torch.device("meta"):
            return Metric(checkpoint.kind, hparams, local=checkpoint.encoder_is_local)
    except UserError:
        raise
    except OSError:  # of transformers: offline, or no such repository
        raise UserError(
            f"encoder {checkpoint.encoder}: its config and tokenizer are neither here nor can they "
            "be fetched from the hub; give --encoder a local folder"
        ) from None
    except Exception as error:  # whatever transformers and torch make of wrong settings
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UserError(
            f"{checkpoint.file}: its hyper-parameters, or config and tokenizer of encoder "
            f"{checkpoint.encoder}, are none that a {checkpoint.kind} can be built from: {reason}"
        ) from error


def _fill_buffers(metric: Any) -> None:
    """Give memory to what a checkpoint need not hold: positions, types of tokens, and buffers of
    the training's dropout."""
    import torch

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
    """Raise UserError where a weight or a layer is missing that a score needs."""
    used = ("encoder.", "estimator.", "hidden2tag.", "layerwise_attention.")
    wanted = {k for k in metric.state_dict() if k.startswith(used) and ".dropout_" not in k}
    missing = sorted(wanted - checkpoint.keys)
    if missing:
        raise UserError(
            f"{checkpoint.file}: {len(missing)} weights are missing, the first is {missing[0]}"
        )
    rows = metric.encoder.model.get_input_embeddings().num_embeddings
    if len(metric.encoder.tokenizer) > rows:  # on a GPU such an id ends the process
        raise UserError(
            f"encoder {checkpoint.encoder}: its tokenizer has {len(metric.encoder.tokenizer)} ids, "
            f"the weights know {rows}: it is another model's; give --encoder the right folder"
        )
    layers = metric.encoder.num_layers
    read = {"sent_layer" if "sent_layer" in metric.hparams else "layer": sentence_layer(metric)}
    if getattr(metric, "word_level", False):
        read["word_layer"] = metric.hparams["word_layer"]
    for name, layer in read.items():
        if layer not in range(layers) and (layer != "mix" or name == "word_layer"):
            raise UserError(f"{checkpoint.file}: {name} is {layer!r}, of layers 0..{layers - 1}")
