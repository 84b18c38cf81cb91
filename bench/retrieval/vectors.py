"""Random vectors of pages and queries, and a server that returns them as vLLM's does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request

DIMENSION = 128
MODEL = "drawn"


def vectors_of(name: str, count: int) -> np.ndarray:
    """Return random vectors [count, D], float32, of length 1 each. The name is the seed."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSION), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def of_query(text: str) -> np.ndarray:
    """Return the vectors of a query, [tokens, D]: always 24 tokens."""
    return vectors_of(text, 24)


def of_page(page_id: str) -> np.ndarray:
    """Return the vectors of a page, [patches, D]: 600 to 799, as pages differ in size."""
    return vectors_of(page_id, 600 + int(hashlib.sha256(page_id.encode()).hexdigest(), 16) % 200)


def write_vectors(path: Path, page_ids: Sequence[str]) -> None:
    """Write all pages' vectors as a file that `ingest --late-vectors` reads."""
    from safetensors.numpy import save_file

    save_file({page_id: of_page(page_id) for page_id in page_ids}, path)


app = FastAPI()


@app.post("/pooling")
async def pooling(request: Request) -> dict[str, Any]:
    """Return a query's vectors."""
    texts = (await request.json())["input"]
    rows = [{"index": k, "data": of_query(text).tolist()} for k, text in enumerate(texts)]
    return {"object": "list", "data": rows}


class BareMaxSim:
    """Searches with plain NumPy, as one would without a library.

    pages: [n, D] of each page.
    """

    def __init__(self, pages: Sequence[np.ndarray]) -> None:
        self._pages = pages

    def search(self, query: np.ndarray, top_k: int) -> list[int]:
        """Return the `top_k` best pages, the best first."""
        scores = np.array([(query @ page.T).max(axis=1).sum() for page in self._pages])
        best = np.argpartition(scores, -top_k)[-top_k:]
        return list(best[np.argsort(-scores[best])])


class PackedMaxSim(BareMaxSim):
    """Searches with plain NumPy, with all pages in one product."""

    def __init__(self, pages: Sequence[np.ndarray]) -> None:
        self._all = np.concatenate(pages)
        self._starts = np.cumsum([0, *(len(page) for page in pages)])[:-1]

    def search(self, query: np.ndarray, top_k: int) -> list[int]:
        """Return the `top_k` best pages, the best first."""
        scores = np.maximum.reduceat(self._all @ query.T, self._starts).sum(axis=1)
        best = np.argpartition(scores, -top_k)[-top_k:]
        return list(best[np.argsort(-scores[best])])
