"""Load the finished metric checkpoints the plain way (transformers, comet) and score with them.

The evaluation uses this instead of the services, so that it also checks that the files are what
upstream code expects.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from transformers import AutoTokenizer, MT5ForConditionalGeneration

warnings.filterwarnings("ignore", message="pkg_resources is deprecated")


def by_length(texts: list[str], size: int) -> list[list[int]]:
    """Indices in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]


class MetricX:
    """MetricX-24 scoring of an mT5 checkpoint: 0 best, 25 worst."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = MT5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.token = self.model.config.score_token_id

    @torch.no_grad()
    def __call__(
        self, sources: list[str], candidates: list[str], references: list[str] | None = None
    ) -> list[float]:
        """Scores; QE unless references are given."""
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
    """Upstream xCOMET prediction: scores (1 best) and error spans."""

    def __init__(self, folder: Path) -> None:
        from comet.models import XCOMETMetric

        logging.getLogger("comet").setLevel(logging.WARNING)
        self.model = XCOMETMetric.load_from_checkpoint(
            folder / "checkpoints" / "model.ckpt",
            map_location="cpu",
            strict=True,
            weights_only=True,
            load_pretrained_weights=False,
            local_files_only=True,
            pretrained_model=str(folder / "encoder"),
        ).eval()

    @torch.no_grad()
    def __call__(
        self, sources: list[str], candidates: list[str], references: list[str] | None = None
    ) -> tuple[list[float], list[list[dict]]]:
        """Scores and spans; QE unless references are given."""
        samples = [{"src": s, "mt": c} for s, c in zip(sources, candidates, strict=True)]
        if references is not None:
            samples = [s | {"ref": r} for s, r in zip(samples, references, strict=True)]
        scores: list[float] = [0.0] * len(samples)
        spans: list[list[dict]] = [[] for _ in samples]
        for part in by_length(candidates, 64):
            batch = self.model.prepare_for_inference([samples[i] for i in part])
            output = self.model.predict_step(batch)
            for position, index in enumerate(part):
                scores[index] = float(output.scores[position])
                spans[index] = output.metadata.error_spans[position]
        return scores, spans
