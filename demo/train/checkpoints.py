"""Load the finished metric checkpoints and score with them, without the services' HTTP.

MetricX's is read the plain way, by transformers. That unbabel-comet reads xCOMET's and scores the
same with it is a test (`make test-oracle`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, MT5ForConditionalGeneration

from scorekit.schemas import TranslationSample, XCometOptions
from scorekit.server.backend import Encoded
from services.xcomet.model import XCometBackend


def by_length(texts: list[str], size: int) -> list[list[int]]:
    """Return indices in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]


class MetricX:
    """Scores with MetricX-24, an mT5 checkpoint: 0 is best, 25 worst."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = MT5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.token = self.model.config.score_token_id

    @torch.no_grad()
    def __call__(
        self, sources: list[str], candidates: list[str], references: list[str] | None = None
    ) -> list[float]:
        """Return scores; QE unless references are given."""
        texts = [f"source: {s} candidate: {c}" for s, c in zip(sources, candidates, strict=True)]
        if references is not None:
            texts = [f"{t} reference: {r}" for t, r in zip(texts, references, strict=True)]
        scores = [0.0] * len(texts)
        for part in by_length(texts, 64):
            rows = [self.tokenizer(texts[i])["input_ids"][:-1] for i in part]  # EOS dropped
            width = max(len(row) for row in rows)
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            start = torch.zeros(len(part), 1, dtype=torch.long)
            logits = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=start).logits
            for index, value in zip(part, logits[:, 0, self.token].tolist(), strict=True):
                scores[index] = min(25.0, max(0.0, value))
        return scores


class XComet:
    """Scores with xCOMET as upstream predicts: scores (1 is best) and raw error spans."""

    def __init__(self, folder: Path) -> None:
        self.backend = XCometBackend(str(folder), device="cpu")
        self.backend.load()

    def __call__(
        self, sources: list[str], candidates: list[str], references: list[str] | None = None
    ) -> tuple[list[float], list[list[dict]]]:
        """Return scores and spans; QE unless references are given. Raises SampleError for a
        text that cannot be read.
        """
        samples = [
            TranslationSample(src=s, mt=c, ref=None if references is None else references[k])
            for k, (s, c) in enumerate(zip(sources, candidates, strict=True))
        ]
        scores: list[float] = [0.0] * len(samples)
        spans: list[list[dict]] = [[] for _ in samples]
        for part in by_length(candidates, 64):
            encoded: list[Encoded] = []
            for result in self.backend.encode(
                [samples[i] for i in part], XCometOptions(span_offsets="upstream")
            ):
                if not isinstance(result, Encoded):
                    raise result
                encoded.append(result)
            for index, outcome in zip(part, self.backend.forward(encoded), strict=True):
                if not isinstance(outcome, dict):
                    raise outcome
                scores[index] = outcome["score"]
                spans[index] = [
                    {**span, "severity": span["severity"].lower()}
                    for span in outcome["error_spans"]
                ]
        return scores, spans
