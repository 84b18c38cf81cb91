"""A reward without a learned metric: how likely a translation is, and its source given it.

The trainer calls it in its own process (`reward.metricx_urls=MODULE:CLASS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from demo.train.common import pad
from demo.train.policy import load, pair_ids
from demo.train.tokenizer import PAD
from scorekit.schemas import Scored, Truncated
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig

#: The score falls by this for a nat of both means together. So the scores of a source's samples
#: spread about as MetricX's do.
SCALE = 5.0


class LogProbability:
    """Scores translations by the sum of two means, in nats a token; as MetricX, low is good.

    One mean is of the translation given its source, the other of the source given the translation.
    """

    def __init__(self, forward: str, backward: str) -> None:
        """Load both policies.

        forward: folder of the one that translates. backward: of one in the other direction.
        """
        self.forward, self.backward = load(Path(forward)), load(Path(backward))

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Return a score of each sample, in order."""
        forward = mean_logprobs(*self.forward, [(s.src, s.mt) for s in samples])
        backward = mean_logprobs(*self.backward, [(s.mt, s.src) for s in samples])
        scores = [-SCALE * (a + b) for a, b in zip(forward, backward, strict=True)]
        results = [
            Scored(
                id=sample.id,
                ok=True,
                score=score,
                tokens=0,
                truncated=Truncated(src=False, mt=False),
                mt_covered=len(sample.mt),
                cached=False,
            )
            for sample, score in zip(samples, scores, strict=True)
        ]
        return RewardOutput(list(scores), list(results))


@torch.no_grad()
def mean_logprobs(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the mean log-probability, in nats a token, of each target and its end.

    pairs: (source, target).
    """
    items = [pair_ids(tokenizer, source, target) for source, target in pairs]
    ids = pad([item for item, _ in items], PAD)
    labels = pad([[-100] * length + item[length:] for item, length in items], -100)[:, 1:]
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits[:, :-1].float()
    is_target = labels != -100
    logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    sums = (logprobs * is_target).sum(-1) / is_target.sum(-1)
    return [float(value) for value in sums]
