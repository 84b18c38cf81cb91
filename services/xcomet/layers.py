"""What the heads of xCOMET read from the encoder, gathered while it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class LayerTaps:
    """Runs an encoder and keeps the first position of every layer, and one layer whole.

    As in transformers, layer n stands for the input of block n, and the last one for the encoder's
    output (with XLM-R-XL: after its final layer norm). Not thread-safe.

    layer_norm: normalise each layer over all positions and dimensions of a row first, as
    unbabel-comet's `LayerwiseAttention(layer_norm=True)` does.
    """

    def __init__(self, model: nn.Module, *, word_layer: int, layer_norm: bool) -> None:
        self._model = model
        self._word_layer = word_layer
        self._layer_norm = layer_norm
        self._states: list[torch.Tensor] = []
        self._words: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        for index, block in enumerate(model.encoder.layer):
            block.register_forward_pre_hook(partial(self._before_block, index))

    def run(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, mask [R, L] -> first positions [N+1, R, H] in float32, word layer [R, L, H]."""
        import torch

        self._states, self._words, self._mask = [], None, mask
        output = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=False)
        self._keep(len(self._states), output.last_hidden_state)
        words, states = self._words, torch.stack(self._states)
        self._states, self._words, self._mask = [], None, None
        assert words is not None
        return states, words

    def _before_block(self, index: int, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._keep(index, inputs[0])

    def _keep(self, index: int, hidden: torch.Tensor) -> None:
        if index == self._word_layer:
            self._words = hidden
        # A copy: a view would keep the whole layer alive.
        first = hidden[:, 0].float().clone()
        self._states.append(self._normalise(first, hidden.float()) if self._layer_norm else first)

    def _normalise(self, first: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`_layer_norm` of unbabel-comet's LayerwiseAttention, for the first position [R, H]."""
        assert self._mask is not None
        mask = self._mask.float()[:, :, None]
        count = mask.sum((1, 2)) * hidden.shape[-1]  # [R]
        mean = (hidden * mask).sum((1, 2)) / count
        deviation = (hidden * mask - mean[:, None, None]) * mask
        variance = (deviation**2).sum((1, 2)) / count
        return (first - mean[:, None]) / (variance + 1e-12).sqrt()[:, None]


def layer_weights(metric: Any) -> torch.Tensor:
    """Share of each layer in the sentence head, [N+1]: the learnt mix, or one layer alone."""
    import torch

    layers = metric.encoder.num_layers
    if metric.layerwise_attention is None:
        return torch.eye(layers)[metric.hparams.sent_layer]
    mix = metric.layerwise_attention
    scalars = torch.cat([p.detach() for p in mix.scalar_parameters])
    return mix.gamma.detach() * mix.transform_fn(scalars, dim=0)
