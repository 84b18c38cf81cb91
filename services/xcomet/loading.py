"""Building unbabel-comet's model of a checkpoint, without holding it twice."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from services.xcomet.checkpoint import Checkpoint, read_checkpoint
from services.xcomet.layers import sentence_layer

if TYPE_CHECKING:
    import torch


def load_metric(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """The checkpoint as its class of unbabel-comet, for inference: its encoder in `dtype`, the
    rest in float32, on the device. Not by upstream's own loading, which holds a large checkpoint
    twice in host memory, and in float32: here the file is mapped, and each weight of it goes to its
    place in its dtype.
    """
    import torch
    from comet.models import str2model

    from services.xcomet.deberta import register

    register()
    stored = read_checkpoint(checkpoint.file)
    known = signature(str2model[checkpoint.kind].__init__).parameters
    arguments = {name: v for name, v in stored["hyper_parameters"].items() if name in known}
    arguments |= {
        "load_pretrained_weights": False,
        "local_files_only": checkpoint.encoder_is_local,
        "pretrained_model": checkpoint.encoder,
        "encoder_model": checkpoint.encoder_model,
        "layer_transformation": checkpoint.layer_transformation,
    }
    metric = _build(checkpoint, arguments)
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
    metric.to(device)  # what is no weight, such as positions
    _check(checkpoint, metric)
    return metric.eval()


def _build(checkpoint: Checkpoint, arguments: dict[str, Any]) -> Any:
    """The class of unbabel-comet, without numbers in its weights: the memory of billions of them
    is never touched."""
    from comet.models import str2model
    from transformers.modeling_utils import no_init_weights

    try:
        with no_init_weights():
            return str2model[checkpoint.kind](**arguments)
    except OSError:  # of transformers: offline, or no such repository
        raise UserError(
            f"encoder {checkpoint.encoder}: its config and tokenizer are neither here nor can they "
            "be fetched from the hub; give --encoder a local folder"
        ) from None
    except Exception as error:  # whatever upstream and transformers make of wrong settings
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UserError(
            f"{checkpoint.file}: its hyper-parameters, or config and tokenizer of encoder "
            f"{checkpoint.encoder}, are none that a {checkpoint.kind} can be built from: {reason}"
        ) from error


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
