"""COMET-22 and similar models: each text is encoded alone, and a head compares the embeddings.

Rei et al. 2020, "COMET: A Neural Framework for MT Evaluation" (arXiv 2009.09025). Classes of
unbabel-comet: `RegressionMetric` (with a reference), `ReferencelessRegression` (without) and
`RankingMetric`.

Shapes: S samples, R rows (2 or 3 a sample), H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pairwise_distance

from scorekit.errors import SampleError, UserError
from scorekit.schemas import ScoreRange, Wanted, XCometOptions
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.tokenizers import TokenizedText
from services.xcomet.comet_model import CometBase, PooledTaps, has_layer_norm, input_fields

_POOLS = ("avg", "max", "cls", "default")


class Regression(CometBase):
    """`regression_metric`: compares the translation with its source and its reference."""

    _ref: Wanted = "required"

    def __init__(self, metric: Any, device: torch.device) -> None:
        super().__init__(metric, device, {"src": "required", "mt": "required", "ref": self._ref})
        pool = metric.hparams["pool"]
        if pool not in _POOLS:
            raise UserError(f"pool is {pool!r} in the checkpoint; served are {', '.join(_POOLS)}")
        self.taps = PooledTaps(
            self.transformer, self.mix, pool=pool, layer_norm=has_layer_norm(metric)
        )

    def assemble(
        self, tokenized: dict[str, TokenizedText], mt: str, limit: int, options: XCometOptions
    ) -> Encoded | SampleError:
        """Return one row <s> text </s> for each text. Upstream reads two ids fewer than
        possible."""
        cut_flags = [read.is_cut for read in tokenized.values()]
        if options.overlong == "error" and any(cut_flags):
            longest = max(tokenized, key=lambda name: tokenized[name].total)
            message = f"{longest}: {tokenized[longest].total + 2} tokens, limit {limit - 2}"
            return SampleError("overlong", message)
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        rows = [[first, *read.ids, last] for read in tokenized.values()]
        fields = input_fields(tokenized, cut_flags, sum(map(len, rows)))
        return Encoded(max(map(len, rows)), fields, rows, rows=len(rows))

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return a score for each sample; there are no spans."""
        ids, mask = self.table([row for encoded in batch for row in encoded.payload])
        embedded = self.taps.run(ids, mask, self.tokenizer.pad_token_id)  # [R, H]
        by_text = embedded.view(len(batch), -1, embedded.shape[-1]).unbind(1)  # each [S, H]
        scores = self._scores(*by_text).tolist()
        return [
            {"score": score}
            if math.isfinite(score)
            else SampleError("non_finite", "the model gave a number that is not finite")
            for score in scores
        ]

    def _scores(self, *by_text: torch.Tensor) -> torch.Tensor:
        """Return scores [S] of embeddings [S, H] of each text, in the order mt, src, ref."""
        scores: torch.Tensor = self.estimator(self._features(*by_text)).view(-1)
        return scores

    def _features(self, mt: Any, src: Any, ref: Any) -> torch.Tensor:
        """Return the head's input [S, 6 H] of embeddings [S, H], as `RegressionMetric.estimate`."""
        parts = (mt, ref, mt * ref, (mt - ref).abs(), mt * src, (mt - src).abs())
        return torch.cat(parts, dim=1)


class Referenceless(Regression):
    """`referenceless_regression_metric`: compares the translation with its source only."""

    _ref = "ignored"

    def _features(self, mt: Any, src: Any, ref: Any = None) -> torch.Tensor:
        """Return the head's input [S, 4 H] of embeddings [S, H], as `ReferencelessRegression`."""
        return torch.cat((mt, src, mt * src, (mt - src).abs()), dim=1)


class Ranking(Regression):
    """`ranking_metric`: the closeness of the translation to its source and its reference."""

    @property
    def score_range(self) -> ScoreRange:
        """Return 0 to 1; 1 means that the translation's embedding equals the source's or
        reference's."""
        return ScoreRange(min=0.0, max=1.0)

    def _scores(self, *by_text: torch.Tensor) -> torch.Tensor:
        """Return 1 / (1 + d) with d the harmonic mean of both distances, as `RankingMetric`."""
        mt, src, ref = by_text
        to_src, to_ref = pairwise_distance(mt, src), pairwise_distance(mt, ref)
        return 1 / (1 + 2 * to_ref * to_src / (to_ref + to_src))
