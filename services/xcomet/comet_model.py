"""The base of all classes of the COMET family: which texts they read, how ids are batched, and how
layers of the encoder are captured for their heads.

Imported only to load a model, as the classes themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from scorekit.errors import SampleError
from scorekit.schemas import ScoreRange, TranslationSample, Wanted, XCometOptions
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.tokenizers import TokenizedText

#: `final_activation` -> smallest and largest output of the regression head.
_BOUNDS = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}


class CometBase(ABC):
    """A loaded checkpoint of one class: `texts` -> `assemble` -> `forward`.

    inputs: required, optional or ignored, for each of `src`, `mt` and `ref`.
    """

    def __init__(self, metric: Any, device: torch.device, inputs: dict[str, Wanted]) -> None:
        self.inputs = inputs
        encoder = metric.encoder
        self.tokenizer = encoder.tokenizer
        self.limit: int = encoder.max_positions
        self.transformer = encoder.model
        self.estimator: Any = getattr(metric, "estimator", None)  # a ranking metric has none
        self.mix = layer_weights(metric).to(device)  # [N+1]
        self._device = device
        activation = str(metric.hparams.get("final_activation")).lower()
        self._bounds = _BOUNDS.get(activation, (None, None))

    @property
    def score_range(self) -> ScoreRange:
        """Return the range of the score."""
        return ScoreRange(min=self._bounds[0], max=self._bounds[1])

    def texts(self, sample: TranslationSample) -> dict[str, str] | SampleError:
        """Return the texts that the model reads, by name, the translation first."""
        if sample.ref is None and self.inputs["ref"] == "required":
            message = "ref: required by this model, which scores against a reference"
            return SampleError("invalid_input", message)
        candidates = {"mt": sample.mt, "src": sample.src, "ref": sample.ref}
        return {
            n: t for n, t in candidates.items() if t is not None and self.inputs[n] != "ignored"
        }

    @abstractmethod
    def assemble(
        self, tokenized: dict[str, TokenizedText], mt: str, limit: int, options: XCometOptions
    ) -> Encoded | SampleError:
        """Build the rows of a sample from its ids, of which no row has more than `limit`.

        tokenized: the texts that the model reads, by name, the translation `mt` first."""

    @abstractmethod
    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the outcomes of a batch in order; called within `inference_mode`."""

    def table(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return padded ids and their mask, both [R, L]."""
        lengths = np.array([len(row) for row in rows])
        table = np.full((len(rows), lengths.max()), self.tokenizer.pad_token_id)
        for k, row in enumerate(rows):
            table[k, : len(row)] = row
        is_token = np.arange(table.shape[1]) < lengths[:, None]
        ids = torch.from_numpy(table).to(self._device)
        return ids, torch.from_numpy(is_token.astype(np.int64)).to(self._device)


def input_fields(
    tokenized: dict[str, TokenizedText], is_cut: Sequence[bool], tokens: int
) -> dict[str, Any]:
    """Return a result's input fields.

    is_cut: for each text, True if its end was not read.
    """
    truncated = dict.fromkeys(("mt", "src", "ref"), False)
    return {
        "tokens": tokens,
        "truncated": truncated | dict(zip(tokenized, is_cut, strict=True)),
        "mt_covered": tokenized["mt"].covered,
    }


class _Taps:
    """Runs an encoder and passes every layer, [R, L, H], to `_keep`.

    As in transformers, layer n is the input of block n, and the last layer is the encoder's output
    (with XLM-R-XL: after its final layer norm). Not thread-safe.

    layer_norm: first normalize each layer over all positions and dimensions of a row, as
    unbabel-comet's `LayerwiseAttention(layer_norm=True)` does.
    """

    def __init__(self, model: nn.Module, *, layer_norm: bool) -> None:
        self._model = model
        self._layer_norm = layer_norm
        self._mask: torch.Tensor | None = None
        self._last = len(model.encoder.layer)
        for index, block in enumerate(model.encoder.layer):
            block.register_forward_pre_hook(partial(self._before_block, index))

    def _encode(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self._mask = mask
        output = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=False)
        self._keep(self._last, output.last_hidden_state)
        self._mask = None

    def _before_block(self, index: int, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._keep(index, inputs[0])

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        raise NotImplementedError

    def _normalize(self, part: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return a normalized part [R, P, H] of `hidden`, as LayerwiseAttention's `_layer_norm`."""
        assert self._mask is not None
        mask = self._mask.float()[:, :, None]
        count = mask.sum((1, 2)) * hidden.shape[-1]  # [R]
        mean = (hidden * mask).sum((1, 2)) / count
        deviation = (hidden * mask - mean[:, None, None]) * mask
        variance = (deviation**2).sum((1, 2)) / count
        return (part - mean[:, None, None]) / (variance + 1e-12).sqrt()[:, None, None]


class LayerCapture(_Taps):
    """Keeps the first position of every layer, and all of one layer (word_layer; None: no
    layer)."""

    def __init__(self, model: nn.Module, *, word_layer: int | None, layer_norm: bool) -> None:
        super().__init__(model, layer_norm=layer_norm)
        self._word_layer = word_layer
        self._states: list[torch.Tensor] = []
        self._words: torch.Tensor | None = None

    def run(
        self, ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return first positions [N+1, R, H] in float32 and the word layer [R, L, H]."""
        self._states, self._words = [], None
        self._encode(ids, mask)
        words, states = self._words, torch.stack(self._states)
        self._states, self._words = [], None
        return states, words

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        if index == self._word_layer:
            self._words = hidden
        # Copy, because a view would keep the full layer in memory.
        first = hidden[:, 0].float().clone()
        if self._layer_norm:
            first = self._normalize(first[:, None], hidden.float())[:, 0]
        self._states.append(first)


class PooledTaps(_Taps):
    """Sums the mix of all layers at every position, and pools it over a row.

    mix: share of each layer, [N+1].
    pool: as in unbabel-comet's `compute_sentence_embedding`: avg, max, cls, or default (the first
    position of the last layer).
    """

    def __init__(self, model: nn.Module, mix: torch.Tensor, *, pool: str, layer_norm: bool) -> None:
        super().__init__(model, layer_norm=layer_norm)
        self._shares = mix.tolist()
        if pool == "default":
            self._shares, self._layer_norm = [0.0] * self._last + [1.0], False
        self._pool = pool
        self._sum: torch.Tensor | None = None

    def run(self, ids: torch.Tensor, mask: torch.Tensor, pad: int) -> torch.Tensor:
        """Return embeddings [R, H] in float32 of ids, mask [R, L].

        pad: the padding's id.
        """
        self._sum = None
        self._encode(ids, mask)
        mixed, self._sum = self._sum, None
        assert mixed is not None
        # As upstream: padding is found by its id, so a padding token within a text is masked here,
        # but the mask below counts it.
        padding = ids.eq(pad)[:, :, None]
        if self._pool == "max":
            return mixed.masked_fill(padding, float("-inf")).amax(1)
        if self._pool == "avg":
            return mixed.masked_fill(padding, 0.0).sum(1) / mask.sum(1)[:, None]
        return mixed[:, 0]

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        share = self._shares[index]
        if not share:  # a single layer, or a sparse mix
            return
        layer = hidden.float()
        if self._layer_norm:
            layer = self._normalize(layer, layer)
        self._sum = share * layer if self._sum is None else self._sum + share * layer


def layer_weights(metric: Any) -> torch.Tensor:
    """Return each layer's share in the sentence head, [N+1]: the learned mix, or a single layer."""
    layers = metric.encoder.num_layers
    if metric.layerwise_attention is None:
        return torch.eye(layers)[sentence_layer(metric)]
    mix = metric.layerwise_attention
    scalars = torch.cat([p.detach() for p in mix.scalar_parameters])
    return mix.gamma.detach() * mix.transform_fn(scalars, dim=0)


def sentence_layer(metric: Any) -> Any:
    """Return the layer that the sentence head reads: `mix`, or its number."""
    hparams = metric.hparams
    return hparams["sent_layer"] if "sent_layer" in hparams else hparams["layer"]


def has_layer_norm(metric: Any) -> bool:
    """Return True if each layer is normalized before the mix."""
    return metric.layerwise_attention is not None and bool(metric.hparams["layer_norm"])
