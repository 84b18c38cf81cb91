"""An embedder without a model. Texts that share words get similar vectors.

The vector of a text is a function of its words.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded, Outcome
from services.embedder.endpoint import (
    EmbedderDescription,
    EmbedderRerankEndpoint,
    EmbeddingsEndpoint,
    EmbedOptions,
)


class FakeEmbedder:
    """An embedder whose tokens are words. A text may have `max_length` of them."""

    service = "embedder"
    endpoint = EmbeddingsEndpoint(EmbedderRerankEndpoint())

    def __init__(self, dimension: int = 8, max_length: int = 64) -> None:
        self.dimension, self.max_length = dimension, max_length

    def load(self) -> EmbedderDescription:
        """Return the description at once. There is nothing to load."""
        return EmbedderDescription(
            model="fake",
            revision="0",
            tokenizer="words",
            dtype="float32",
            device="cpu",
            max_input_length=self.max_length,
            pooling="mean",
            dimension=self.dimension,
            prompts={"query": "query: "},
        )

    def encode(self, samples: Sequence[str], options: EmbedOptions) -> list[Encoded | SampleError]:
        """Split the texts into words, at most `max_length` each."""
        encoded: list[Encoded | SampleError] = []
        for text in samples:
            words = f"{options.prompt}{text}".split()
            if len(words) > self.max_length and not options.truncate:
                encoded.append(SampleError("overlong", f"more than {self.max_length} tokens"))
                continue
            truncated = words[: self.max_length]
            fields = {
                "tokens": len(truncated),
                "truncated": {"input": len(truncated) < len(words)},
            }
            encoded.append(Encoded(max(1, len(truncated)), fields, truncated))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return vectors, float32 [D]."""
        return [{"embedding": vector_of(item.payload, self.dimension)} for item in batch]

    def probe(self, words: int) -> str:
        """Return a text of so many words."""
        return "w " * words

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return None: there is no device."""
        return None


def vector_of(words: Sequence[str], dimension: int = 8) -> np.ndarray:
    """Return the sum of a vector for each word, normalized; the same numbers on every
    processor.
    """
    total = [0.01] * dimension  # an empty text has a vector, too
    for word in words:
        digest = hashlib.blake2b(word.encode(), digest_size=dimension).digest()
        total = [number + byte / 128 - 1 for number, byte in zip(total, digest, strict=True)]
    length = math.sqrt(math.fsum(number * number for number in total))
    return np.array([number / length for number in total], dtype=np.float32)
