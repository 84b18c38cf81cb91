"""What the heads of the COMET family read from the encoder, gathered while it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class _Taps:
    """Runs an encoder and is shown every layer, [R, L, H], by `_keep`.

    As in transformers, layer n stands for the input of block n, and the last one for the encoder's
    output (with XLM-R-XL: after its final layer norm). Not thread-safe.

    layer_norm: normalise each layer over all positions and dimensions of a row first, as
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

    def _normalise(self, part: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`_layer_norm` of unbabel-comet's LayerwiseAttention, for a part [R, P, H] of `hidden`."""
        assert self._mask is not None
        mask = self._mask.float()[:, :, None]
        count = mask.sum((1, 2)) * hidden.shape[-1]  # [R]
        mean = (hidden * mask).sum((1, 2)) / count
        deviation = (hidden * mask - mean[:, None, None]) * mask
        variance = (deviation**2).sum((1, 2)) / count
        return (part - mean[:, None, None]) / (variance + 1e-12).sqrt()[:, None, None]


class LayerTaps(_Taps):
    """Keeps the first position of every layer, and one layer whole (word_layer; None: no layer)."""

    def __init__(self, model: nn.Module, *, word_layer: int | None, layer_norm: bool) -> None:
        super().__init__(model, layer_norm=layer_norm)
        self._word_layer = word_layer
        self._states: list[torch.Tensor] = []
        self._words: torch.Tensor | None = None

    def run(
        self, ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, mask [R, L] -> first positions [N+1, R, H] in float32, word layer [R, L, H]."""
        import torch

        self._states, self._words = [], None
        self._encode(ids, mask)
        words, states = self._words, torch.stack(self._states)
        self._states, self._words = [], None
        return states, words

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        if index == self._word_layer:
            self._words = hidden
        # A copy: a view would keep the whole layer alive.
        first = hidden[:, 0].float().clone()
        if self._layer_norm:
            first = self._normalise(first[:, None], hidden.float())[:, 0]
        self._states.append(first)


class PooledTaps(_Taps):
    """Sums up the mix of all layers at every position, and pools it over a row.

    mix: share of each layer, [N+1]. pool: of unbabel-comet's `compute_sentence_embedding`: avg, max
    or cls, or default (the first position of the last layer).
    """

    def __init__(self, model: nn.Module, mix: torch.Tensor, *, pool: str, layer_norm: bool) -> None:
        super().__init__(model, layer_norm=layer_norm)
        self._shares = mix.tolist()
        if pool == "default":
            self._shares, self._layer_norm = [0.0] * self._last + [1.0], False
        self._pool = pool
        self._sum: torch.Tensor | None = None

    def run(self, ids: torch.Tensor, mask: torch.Tensor, pad: int) -> torch.Tensor:
        """ids, mask [R, L], the padding's id -> embeddings [R, H] in float32."""
        self._sum = None
        self._encode(ids, mask)
        mixed, self._sum = self._sum, None
        assert mixed is not None
        # Upstream asks the ids, so that a padding mark that a text itself has counts as one here,
        # and the mask below, of which it is a part.
        padding = ids.eq(pad)[:, :, None]
        if self._pool == "max":
            return mixed.masked_fill(padding, float("-inf")).amax(1)
        if self._pool == "avg":
            return mixed.masked_fill(padding, 0.0).sum(1) / mask.sum(1)[:, None]
        return mixed[:, 0]

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        share = self._shares[index]
        if not share:  # one layer alone, or a sparse mix
            return
        layer = hidden.float()
        if self._layer_norm:
            layer = self._normalise(layer, layer)
        self._sum = share * layer if self._sum is None else self._sum + share * layer


def layer_weights(metric: Any) -> torch.Tensor:
    """Share of each layer in the sentence head, [N+1]: the learnt mix, or one layer alone."""
    import torch

    layers = metric.encoder.num_layers
    if metric.layerwise_attention is None:
        return torch.eye(layers)[sentence_layer(metric)]
    mix = metric.layerwise_attention
    scalars = torch.cat([p.detach() for p in mix.scalar_parameters])
    return mix.gamma.detach() * mix.transform_fn(scalars, dim=0)


def sentence_layer(metric: Any) -> Any:
    """The hyper-parameter that says which layer the sentence head reads: `mix`, or its number."""
    hparams = metric.hparams
    return hparams["sent_layer"] if "sent_layer" in hparams else hparams["layer"]


def normalises(metric: Any) -> bool:
    """Whether the mix of the layers normalises each of them first."""
    return metric.layerwise_attention is not None and bool(metric.hparams["layer_norm"])
