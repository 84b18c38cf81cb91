"""The base of all classes of the COMET family: which texts they read, and how ids are batched.

Imported only to load a model, as the classes themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from scorekit.errors import SampleError
from scorekit.schemas import ScoreRange, TranslationSample, Wanted, XCometOptions
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.queue.tokenizer import TokenizedText
from services.xcomet.layer_capture import layer_weights

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
    """Return a result's input fields. is_cut: for each text, True if its end was not read."""
    truncated = dict.fromkeys(("mt", "src", "ref"), False)
    return {
        "tokens": tokens,
        "truncated": truncated | dict(zip(tokenized, is_cut, strict=True)),
        "mt_covered": tokenized["mt"].covered,
    }
