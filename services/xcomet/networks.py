"""The networks of the COMET family. Imported only to load a model.

The formulas, and the names of the weights, are those of unbabel-comet 2.2.7
(github.com/Unbabel/COMET, Apache-2.0), so that checkpoints load in both implementations:
`LayerwiseAttention`, `FeedForward`, and the `__init__` of its metrics. `joint` and `pooled` process
the outputs.

Shapes: R rows, L positions, H hidden size, N layers of the encoder (N+1 with its embeddings).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    XLMRobertaConfig,
    XLMRobertaModel,
    XLMRobertaXLConfig,
    XLMRobertaXLModel,
)

from services.xcomet.classes import JOINT
from services.xcomet.tokenizer import read_tokenizer

#: The labels of XCOMETMetric, except "no error".
_SEVERITIES = ["minor", "major", "critical"]
_CONFIGS: dict[str, Any] = {
    "XLM-RoBERTa": XLMRobertaConfig,
    "XLM-RoBERTa-XL": XLMRobertaXLConfig,
    "DeBERTa": DebertaV2Config,
}
#: Number of embeddings that a class's head compares: its input has this many times H dimensions.
_HEAD_INPUTS = {
    "regression_metric": 6,
    "referenceless_regression_metric": 4,
    "unified_metric": 1,
    "xcomet_metric": 1,
}


def sparsemax(scores: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the point of the probability simplex that is nearest to `scores` [N].

    Martins & Astudillo 2016, "From Softmax to Sparsemax" (arXiv 1602.02068), algorithm 1: sorted
    from large to small, the first k scores with 1 + k z_k > z_1 + ... + z_k are the support, and
    tau = (z_1 + ... + z_k - 1) / k is taken from each score.
    """
    assert scores.ndim == 1 and dim == 0
    ordered = scores.sort(descending=True).values
    sums = ordered.cumsum(0)
    counts = torch.arange(1, len(scores) + 1, device=scores.device)
    k = int((1 + counts * ordered > sums).sum())
    return (scores - (sums[k - 1] - 1) / k).clamp(min=0)


class LayerwiseAttention(nn.Module):  # type: ignore[misc]
    """A learned mix of the encoder's layers: gamma times the sum of share times layer.

    Peters et al. 2018 (ELMo) with the dropout of Kondratyuk & Straka 2019 (UDify): in training the
    scalar of a layer is replaced by -1e20 with probability `dropout`.
    """

    def __init__(
        self, layers: int, *, layer_norm: bool, transformation: str, dropout: float
    ) -> None:
        super().__init__()
        self.layer_norm, self.dropout = layer_norm, dropout
        self.transform_fn = sparsemax if transformation == "sparsemax" else torch.softmax
        self.scalar_parameters = nn.ParameterList(
            [nn.Parameter(torch.zeros(1)) for _ in range(layers)]
        )
        self.gamma = nn.Parameter(torch.ones(1))
        if dropout:  # all upstream checkpoints contain them
            self.register_buffer("dropout_mask", torch.zeros(layers))
            self.register_buffer("dropout_fill", torch.full((layers,), -1e20))

    def forward(self, layers: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Return the mix [R, P, H] of all layers, each [R, P, H], with their mask [R, P].

        Used in training, for a mix without `layer_norm`. The service mixes the layers while the
        encoder runs (`LayerCapture`).
        """
        if self.layer_norm:
            raise NotImplementedError("training with layer_norm")
        scalars = torch.cat(list(self.scalar_parameters))
        if self.training and self.dropout:
            is_dropped = torch.rand_like(scalars) <= self.dropout
            scalars = scalars.masked_fill(is_dropped, -1e20)
        shares = self.transform_fn(scalars, dim=0)
        stacked = torch.stack(tuple(layers))
        return self.gamma * torch.einsum("n,nrph->rph", shares, stacked)


class FeedForward(nn.Module):  # type: ignore[misc]
    """The head from features to a score: linear layers, each followed by an activation."""

    def __init__(
        self,
        features: int,
        hidden_sizes: Sequence[int],
        activations: str,
        final_activation: str | None,
        dropout: float,
    ) -> None:
        super().__init__()
        if not hidden_sizes:
            raise ValueError("hidden_sizes is empty")
        parts: list[nn.Module] = []
        for size in hidden_sizes:
            parts += [nn.Linear(features, size), _activation(activations), nn.Dropout(dropout)]
            features = size
        parts.append(nn.Linear(features, 1))
        if final_activation is not None:
            parts.append(_activation(final_activation))
        self.ff = nn.Sequential(*parts)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return scores [R, 1] of features [R, F]."""
        scores: torch.Tensor = self.ff(features)
        return scores


class Encoder(nn.Module):  # type: ignore[misc]
    """The encoder and its tokenizer.

    max_positions: largest number of ids in a row; two fewer than the position embeddings have, as
    upstream.
    num_layers: embeddings included.
    size_separator: separators between two texts.
    """

    def __init__(self, encoder_model: str, source: str, *, local: bool) -> None:
        super().__init__()
        self.tokenizer = read_tokenizer(encoder_model, source, local=local)
        config = _CONFIGS[encoder_model].from_pretrained(source, local_files_only=local)
        if encoder_model == "DeBERTa":
            self.model = DebertaV2Model(config)
        elif encoder_model == "XLM-RoBERTa-XL":
            self.model = XLMRobertaXLModel(config, add_pooling_layer=False)
        else:
            self.model = XLMRobertaModel(config, add_pooling_layer=False)
        self.max_positions: int = config.max_position_embeddings - 2
        self.num_layers: int = config.num_hidden_layers + 1
        self.output_units: int = config.hidden_size
        self.size_separator = 1 if encoder_model == "DeBERTa" else 2

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all layers, each [R, L, H], of ids and mask [R, L]."""
        output = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        layers: tuple[torch.Tensor, ...] = output.hidden_states
        return layers


class Metric(nn.Module):  # type: ignore[misc]
    """The networks of a checkpoint's class: encoder, layer mix and heads.

    kind: a key of `CLASSES`.
    hparams: from `hyper_parameters`.
    estimator: None for a ranking metric.
    hidden2tag: only in a class that tags words.
    """

    def __init__(self, kind: str, hparams: dict[str, Any], *, local: bool) -> None:
        super().__init__()
        if kind == "xcomet_metric" and list(hparams["error_labels"]) != _SEVERITIES:
            raise ValueError(f"error_labels are {hparams['error_labels']}")
        self.hparams = hparams
        self.encoder = Encoder(hparams["encoder_model"], hparams["pretrained_model"], local=local)
        width = self.encoder.output_units
        joint = kind in JOINT
        self.layerwise_attention = None
        if hparams["sent_layer" if joint else "layer"] == "mix":
            self.layerwise_attention = LayerwiseAttention(
                self.encoder.num_layers,
                layer_norm=bool(hparams["layer_norm"]),
                transformation=hparams["layer_transformation"],
                dropout=hparams["dropout"],
            )
        self.estimator = None
        if kind in _HEAD_INPUTS:
            self.estimator = FeedForward(
                _HEAD_INPUTS[kind] * width,
                hparams["hidden_sizes"],
                hparams["activations"],
                hparams["final_activation"],
                hparams["dropout"],
            )
        self.word_level = joint and bool(hparams["word_level_training"])
        if self.word_level:
            self.hidden2tag = nn.Linear(width, 1 + len(hparams["error_labels"]))
        # Weights of the tags and of the scores: mt+src, mt+ref, mt+src+ref (and spans).
        self.input_weights_spans = torch.tensor([0.1667, 0.3333, 0.5], device="cpu")
        self.score_weights = [0.12, 0.33, 0.33, 0.22]


def _activation(name: str) -> nn.Module:
    """Return the activation with a name, in any case, by upstream's rule."""
    layer_class = getattr(nn.modules.activation, name.title(), None)
    if layer_class is None:
        raise ValueError(f"{name} is not an activation")
    layer: nn.Module = layer_class()
    return layer
