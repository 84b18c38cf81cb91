"""The embedder's endpoint with a toy model, which waits and fails on demand.

`python -m tests.kits.embedder --port N` serves it; it answers `slow` when the file is gone that the
variable `SLOW_WHILE` names.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scorekit.client.embeddings import Embedded
from scorekit.errors import SampleError
from scorekit.server.backend import Encoded, Outcome
from testing.fake_embedder import FakeEmbedder
from testing.fake_embedder import vector_of as vector_of_words
from testing.servers import PATIENCE_S

LENGTH, MAX_TOKENS = 8, 16


def vector_of(text: str) -> list[float]:
    """Return the fake vector of a text."""
    return vector_of_words(text.split(), LENGTH).tolist()


def kinds(outcomes: Sequence[Embedded]) -> list[str]:
    """Return for each text "vector", or the type of its error."""
    return [outcome.type if isinstance(outcome, SampleError) else "vector" for outcome in outcomes]


class ToyEmbedder(FakeEmbedder):
    """A toy model: `nan` gives a NaN, `zeros` zeros, `poison` raises, and `slow` waits for `go`."""

    def __init__(self) -> None:
        super().__init__(LENGTH, MAX_TOKENS)
        self.batches: list[list[str]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        texts = [" ".join(item.payload) for item in batch]
        self.batches.append(texts)
        if "slow" in texts:
            self.entered.set()
            assert self.go.wait(PATIENCE_S)
        if "poison" in texts:
            raise RuntimeError("poisoned batch")
        outcomes: list[Any] = super().forward(batch)
        for text, outcome in zip(texts, outcomes, strict=True):
            if text in ("nan", "zeros"):
                number = np.nan if text == "nan" else 0.0
                outcome["embedding"] = np.full(LENGTH, number, dtype=np.float32)
        return outcomes


def _let_go_when_it_is_gone(toy: ToyEmbedder, file: Path) -> None:
    while file.exists():
        time.sleep(0.01)
    toy.go.set()


if __name__ == "__main__":
    from scorekit.server.run import main
    from scorekit.server.settings import ServiceSettings

    served = ToyEmbedder()
    threading.Thread(
        target=_let_go_when_it_is_gone, args=(served, Path(os.environ["SLOW_WHILE"])), daemon=True
    ).start()
    main(ServiceSettings, lambda settings: served)
