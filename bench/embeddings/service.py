"""Compare the embedder with `SentenceTransformer.encode` in the caller's process.

Same texts, same checkpoint (25 million parameters outside its embeddings, random weights),
float32, one thread per model; no text is sent twice, so no cache helps. The two sides run in turn,
and each number is the ratio of the medians.

    python -m bench.embeddings.service [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from bench.common import WORK, Measurement, compare, run, service
from scorekit.client.embeddings import Embeddings
from testing.checkpoints.embedder import make_folder
from testing.pairs import read_pairs
from testing.work_log import waste_percent

CALL, CALLERS = 8, 8
SHAPE: dict[str, Any] = {
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "intermediate": 2048,
    "max_length": 512,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of the measurement."""

    texts: int = 512
    repeats: int = 5


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(CALL * CALLERS, 1) if quick else Sizes()
    folder = WORK / "models/embedder-25m"
    if not (folder / "modules.json").exists():
        make_folder(folder, **SHAPE)
    encode, texts = Encode(folder), Fresh(sizes.texts)
    flags = ("--model", str(folder), "--threads", "1", "--cache", "memory", "--device", "cpu")
    with service("services.embedder", *flags) as (_, url), Embeddings(url) as client:
        client.embed(texts()[:CALL])
        encode(texts()[:CALL])
        yield from in_bulk(client, encode, texts, sizes.repeats)
        yield Measurement("  padded-token waste of its batches", waste_percent(url), "%")
        with ExitStack() as stack:
            clients = [stack.enter_context(Embeddings(url)) for _ in range(CALLERS)]
            yield callers(clients, encode, texts, sizes.repeats)


class Encode:
    """Encodes as most users of sentence-transformers do: batches of 32, sorted by characters."""

    def __init__(self, folder: Path) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def __call__(self, texts: Sequence[str]) -> Any:
        """Return the vectors [B, D] of one call."""
        return self.model.encode(list(texts), show_progress_bar=False)


class Fresh:
    """Returns the demo's English and Korean texts, each time with another number in front.

    So the work is the same, but no text repeats.
    """

    def __init__(self, texts: int) -> None:
        pairs = read_pairs(texts // 2)
        self._texts = [text for pair in pairs for text in (pair.src, pair.mt)]
        self._turn = count(100)

    def __call__(self) -> list[str]:
        """Return the next texts."""
        turn = next(self._turn)
        return [f"{turn} {text}" for text in self._texts]


def in_bulk(
    client: Embeddings, encode: Encode, texts: Fresh, repeats: int
) -> Iterator[Measurement]:
    """Measure all texts in one call of the client, over HTTP."""
    timing = compare(lambda: client.embed(texts()), lambda: encode(texts()), repeats)
    bulk_texts = texts()
    timing["texts"] = len(bulk_texts)
    yield Measurement(
        f"embedder 25 M over HTTP, {len(bulk_texts)} texts in one call, "
        "against encode() in process",
        timing["times_faster"],
        "times its rate",
        at_least=1.0,
        details=timing,
    )
    difference = np.abs(np.array(client.embed(bulk_texts)) - encode(bulk_texts)).max()
    yield Measurement("  largest difference of its vectors", float(difference), "", at_most=1e-5)


def callers(
    clients: Sequence[Embeddings], encode: Encode, texts: Fresh, repeats: int
) -> Measurement:
    """Measure callers that send 8 texts at a time and wait for them.

    They are compared with the same calls of encode() one after another, which cannot join them.
    """

    def calls() -> list[list[str]]:
        call_texts = texts()
        return [call_texts[k : k + CALL] for k in range(0, len(call_texts), CALL)]

    def call_all(client: Embeddings, waiting: Iterator[list[str]]) -> None:
        for call in waiting:
            assert all(isinstance(vector, list) for vector in client.embed(call))

    def embed_over_http() -> None:
        waiting = iter(calls())
        with ThreadPoolExecutor(CALLERS) as pool:
            for done in [pool.submit(call_all, client, waiting) for client in clients]:
                done.result()

    def encode_in_process() -> None:
        for call in calls():
            encode(call)

    for client in clients:
        client.info()
    timing = compare(embed_over_http, encode_in_process, repeats)
    return Measurement(
        f"embedder 25 M, {CALLERS} callers of {CALL} texts over HTTP, against their calls of "
        "encode() one after another",
        timing["times_faster"],
        "times its rate",
        at_least=1.3,
        details=timing | {"texts": len(texts())},
    )


if __name__ == "__main__":
    run("embeddings", __doc__, questions)
