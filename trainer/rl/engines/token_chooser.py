"""Choose ids from logits with one uniform number for each row.

An id depends on its row's logits and number only, not on the rows beside it.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TokenStream:
    """Holds the random numbers of one completion: a uniform number for each sampled token."""

    def __init__(self, seed: int, temperature: float) -> None:
        # torch's generator would use the low 32 bits of a seed only
        self._generator = random.Random(seed)
        self.temperature = temperature

    def next_uniform(self) -> float:
        """Return the next number of the stream, in [0, 1); greedy rows use none."""
        if self.temperature == 0:
            return 0.0
        return self._generator.random()


class TokenChooser:
    """Applies temperatures, top_k and top_p to logits, and chooses an id of each row.

    The id is the first whose cumulative probability exceeds the row's uniform number (inverse
    transform sampling).
    """

    def __init__(self, top_p: float, top_k: int, banned_token_ids: Sequence[int]) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self._banned_ids = torch.tensor(banned_token_ids, dtype=torch.long)
        self._cuts: list[Any] = []
        if top_k > 0:
            self._cuts.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._cuts.append(TopPLogitsWarper(top_p))

    def choose(
        self, logits_BV: Tensor, uniforms: Sequence[float], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen ids [B], and their log-probabilities [B] in the resulting distribution.

        uniforms: a number in [0, 1) for each row.
        temperatures: of each row. 0 chooses the likeliest id, whose log-probability means nothing.
        """
        device = logits_BV.device
        scores = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        if len(self._banned_ids):
            scores = scores.index_fill(-1, self._banned_ids.to(device), -torch.inf)
        if not any(temperatures):
            ids = scores.argmax(-1)
            return ids, torch.zeros_like(ids, dtype=scores.dtype)
        divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=scores.dtype)
        scaled = scores / divisors.to(device)[:, None]
        for cut in self._cuts:
            scaled = cut(None, scaled)
        # One softmax for both: on a CPU `log_softmax` takes ten times as long
        probabilities = scaled.softmax(-1)
        ids = invert_cumulative(probabilities, torch.tensor(uniforms, dtype=torch.float64))
        logprobs = probabilities.gather(-1, ids[:, None])[:, 0].log()
        if not all(temperatures):
            greedy = torch.tensor([t == 0 for t in temperatures], device=device)
            ids = torch.where(greedy, scores.argmax(-1), ids)
        return ids, logprobs


def invert_cumulative(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first id [B] of each row whose cumulative probability exceeds its number.

    The sums are of float64. An id of probability 0 is never returned, whatever their rounding.
    Raises ValueError if the probabilities are not those of a distribution.
    """
    sums = probabilities_BV.cumsum(-1, dtype=torch.float64)
    thresholds = uniforms_B.to(sums.device)[:, None] * sums[:, -1:]
    ids = torch.searchsorted(sums, thresholds, right=True).clamp(max=sums.shape[-1] - 1)
    if not bool((probabilities_BV.gather(-1, ids) > 0).all()):
        # Parallel sums need not increase: an id of probability 0 can seem to raise them
        ids = _first_possible(probabilities_BV, sums > thresholds)
    return ids[:, 0]


def _first_possible(probabilities_BV: Tensor, exceeds_BV: Tensor) -> Tensor:
    """Return, of the ids of positive probability, the first [B, 1] that exceeds, else the last."""
    is_possible = probabilities_BV > 0
    if not bool(is_possible.any(-1).all()):
        raise ValueError("logits: not finite. The model has diverged, or its precision is too low")
    vocabulary = probabilities_BV.shape[-1]
    last = vocabulary - 1 - is_possible.flip(-1).byte().argmax(-1, keepdim=True)
    matches = is_possible & exceeds_BV
    first = matches.byte().argmax(-1, keepdim=True)
    return torch.where(matches.any(-1, keepdim=True), first, last)
