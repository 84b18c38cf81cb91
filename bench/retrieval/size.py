"""Compare the approximate index of late interaction with the exact MaxSim of every page.

The two sides search the same vectors in this machine's processes, one query at a time, without a
server: of clustered vectors (bench/retrieval/clustered.py), and of the token vectors that a small
XLM-R of random weights gives real sentences.

    python -m bench.retrieval.size [--quick]
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from bench.common import WORK, Measurement, in_own_process, run, timed
from bench.retrieval.clustered import ClusteredPages, Vectors, of_length_one
from services.retriever.backends.approximate import Candidates, build_candidates
from services.retriever.backends.ranking import Ranking, best
from services.retriever.backends.vectors import PackedVectors, pack
from testing.retriever_index import make_pages, sentences

TOP_K = 5


class Side(NamedTuple):
    """The results of one side: the best pages and the seconds of each query, and its own memory."""

    rankings: list[Ranking]
    seconds: list[float]
    memory_bytes: int


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    queries = 10 if quick else 40
    count = 1_000 if quick else 2_000
    page_vectors, query_vectors = encoded_pages(count, queries)
    yield from compare_sides(f"{count:,} pages of real sentences", page_vectors, query_vectors)
    # As many vectors as page images have, and as few as pooled ones have.
    for count, vectors in ((1_000, 30),) if quick else ((1_000, 700), (10_000, 100), (30_000, 100)):
        pages = ClusteredPages(count, vectors)
        name = f"{count:,} pages of about {vectors} clustered vectors"
        yield from compare_sides(name, pages, [pages.query(k) for k in range(queries)])


def compare_sides(
    name: str, pages: Iterable[Vectors], queries: Sequence[Vectors]
) -> Iterator[Measurement]:
    """Measure both sides over these pages."""
    folder = WORK / "retrieval/size"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        pack(pages, folder)
        settings: dict[str, Any] = {}
        built_s = timed(lambda: settings.update(build_candidates(folder)))
        approximate = in_own_process(search, folder, settings, queries)
        exact = in_own_process(search, folder, None, queries)
        values, index = (
            (folder / file).stat().st_size for file in ("values.npy", "candidates.faiss")
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    recalls = [recall(*both) for both in zip(approximate.rankings, exact.rankings, strict=True)]
    yield Measurement(
        f"recall@{TOP_K} of {len(queries)} queries over {name}, against the exact MaxSim",
        float(np.mean(recalls)),
        "",
        at_least=0.95,
        details={"worst": min(recalls), "vectors": values // (4 * queries[0].shape[1])} | settings,
    )
    for side, label in ((approximate, "approximate"), (exact, "exact")):
        milliseconds = 1000 * np.array(side.seconds)
        yield Measurement(
            f"  {label}: a query, p50",
            float(np.median(milliseconds)),
            "ms",
            details={"p99": float(np.percentile(milliseconds, 99)), "runs": list(milliseconds)},
        )
        yield Measurement(f"  {label}: memory of its own", side.memory_bytes / 1e6, "MB")
    yield Measurement("  bytes of the vectors on the disk", values / 1e6, "MB")
    yield Measurement("  bytes of the approximate index beside them", index / 1e6, "MB")
    yield Measurement("  seconds to build it", built_s, "s")


def recall(approximate: Ranking, exact: Ranking) -> float:
    """Return the share of the exact ranking's pages that were found. Equal scores are as good."""
    (_, last) = exact[-1]
    return sum(score >= last - 1e-4 * abs(last) for _, score in approximate) / len(exact)


def search(folder: Path, settings: dict[str, Any] | None, queries: Sequence[Vectors]) -> Side:
    """Search by `Candidates`, or with settings None exactly. For a process of its own."""
    before = own_memory_bytes()
    vectors = PackedVectors(folder, is_mapped=settings is not None)
    candidates = Candidates(folder, settings, vectors) if settings else None
    rankings: list[Ranking] = []

    def search_once(query: Vectors) -> None:
        if candidates is None:
            (scores,) = vectors.max_sim([query])
        else:
            scores = candidates.max_sim(query, TOP_K)
        rankings.append(best(scores, TOP_K))

    search_once(queries[0])
    rankings.clear()
    seconds = [timed(lambda query=query: search_once(query)) for query in queries]  # type: ignore[misc]
    return Side(rankings, seconds, own_memory_bytes() - before)


def own_memory_bytes() -> int:
    """Return this process's memory without pages of files, which the system can drop."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def encoded_pages(count: int, queries: int) -> tuple[list[Vectors], list[Vectors]]:
    """Return the token vectors of pages and of queries: an XLM-R of random weights over real text.

    A query is 8 adjacent words of a page, encoded without their neighbors."""
    import torch
    from sentence_transformers import SentenceTransformer

    from testing.checkpoints.embedder import make_folder

    folder = WORK / "models/embedder-tokens"
    if not (folder / "modules.json").exists():
        make_folder(folder, hidden=128, layers=4, heads=4, intermediate=512, max_length=512)
    torch.set_num_threads(1)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    draw = np.random.default_rng(4)
    texts = [page.text for page in make_pages(count, sentences())]
    query_texts = []
    for number in draw.integers(0, count, queries):
        words = texts[number].split()
        start = int(draw.integers(0, max(1, len(words) - 8)))
        query_texts.append(" ".join(words[start : start + 8]))
    return encode(model, texts), encode(model, query_texts)


def encode(model: Any, texts: Sequence[str]) -> list[Vectors]:
    """Return the token vectors of each text, [n, D]."""
    encoded = model.encode(list(texts), output_value="token_embeddings", show_progress_bar=False)
    return [of_length_one(vectors.float().numpy()) for vectors in encoded]


if __name__ == "__main__":
    run("retrieval_size", __doc__, questions)
