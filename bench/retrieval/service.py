"""Compare the retriever over HTTP with its libraries in the caller's process.

Both sides get the same pages, queries and words. No query is sent twice, so no cache helps. The two
sides run in turn, and each number is the ratio of the medians. Recall is measured against every
page scored by the plain formula in float64.

    python -m bench.retrieval.service [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bench.common import WORK, Measurement, compare, run, service, timed
from bench.retrieval.brute_force import PlainBm25, max_sim, recall
from bench.retrieval.vectors import (
    MODEL,
    BareMaxSim,
    PackedMaxSim,
    app,
    of_page,
    of_query,
    write_vectors,
)
from scorekit.retrieval.client import Retriever
from services.retriever.backends.late import VectorFile
from testing.retriever_index import make_pages, make_queries, sentences, write_index
from testing.servers import running_app

TOP_K, CALLERS = 10, 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of the measurement."""

    pages: int = 20_000
    queries: int = 512
    checked: int = 100
    repeats: int = 5
    late_pages: int = 400
    late_queries: int = 32


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(200, 32, 10, 1, 40, 4) if quick else Sizes()
    yield from by_words(sizes)
    yield from by_vectors(sizes)


class Fresh:
    """Yields the queries, each time with another number in front that no page has.

    So the work is the same, but no query repeats.
    """

    def __init__(self, queries: Sequence[str]) -> None:
        self._queries = queries
        self._turn = count(10**6)

    def __call__(self) -> list[str]:
        """Return the next queries."""
        turn = next(self._turn)
        return [f"{turn} {query}" for query in self._queries]


def found_pages(hits: Any, numbers: dict[str, int]) -> list[int]:
    """Return the indexes of the pages of one query's hits. If the service failed, this raises."""
    return [numbers[hit.page_id] for hit in hits]


def by_words(sizes: Sizes) -> Iterator[Measurement]:
    """Measure BM25: `bm25s` with our tokenized words in this process, against the service."""
    import bm25s

    from services.retriever.backends.bm25 import Bm25Builder, Words, page_words

    texts = sentences()
    pages = make_pages(sizes.pages, texts)
    folder = WORK / f"retrieval/bm25-{sizes.pages}"
    write_index(folder, pages, [Bm25Builder("morphemes")])
    words = Words("morphemes")
    words_by_page = list(page_words(pages, words))
    bare = bm25s.BM25(method="lucene")
    bare.index(words_by_page, show_progress=False)

    def search_in_process(queries: Sequence[str]) -> Any:
        queries_sent = [words.of_query(query) for query in queries]
        return bare.retrieve(queries_sent, k=TOP_K, show_progress=False, n_threads=0)

    fresh = Fresh(make_queries(sizes.queries, texts))
    with service("services.retriever", "--index", str(folder), "--cache", "memory") as (_, url):
        with Retriever(url) as client:
            client.search(fresh(), TOP_K)
            search_in_process(fresh())
            times = compare(
                lambda: client.search(fresh(), TOP_K),
                lambda: search_in_process(fresh()),
                sizes.repeats,
            )
            yield Measurement(
                f"bm25 over HTTP, {sizes.queries} queries in one call over {sizes.pages} pages, "
                "against bm25s in process with the same words",
                times["times_faster"],
                "times its rate",
                at_least=0.95,
                details=times | {"queries": sizes.queries, "pages": sizes.pages},
            )
            yield Measurement("  queries a second", sizes.queries / times["ours_s"], "queries/s")
            queries_sent = make_queries(sizes.checked, texts)
            results = client.search(queries_sent, TOP_K)
        with ExitStack() as stack:
            clients = [stack.enter_context(Retriever(url)) for _ in range(CALLERS)]
            yield callers(clients, search_in_process, fresh, sizes)
    plain = PlainBm25(words_by_page)
    numbers = {page.page_id: k for k, page in enumerate(pages)}
    shares = []
    for query, hits in zip(queries_sent, results, strict=True):
        scores = plain.scores(words.of_query(query))
        scores[scores <= 0] = -np.inf
        shares.append(recall(found_pages(hits, numbers), scores, TOP_K))
    yield Measurement(
        f"  recall@{TOP_K} against every page by the formula, worst of {len(shares)} queries",
        min(shares),
        "",
        at_least=1.0,
    )


def callers(
    clients: Sequence[Retriever],
    search_in_process: Callable[[Sequence[str]], Any],
    fresh: Fresh,
    sizes: Sizes,
) -> Measurement:
    """Measure the same queries, sent by callers that each have a share of them."""

    def search_over_http() -> None:
        queries = fresh()
        with ThreadPoolExecutor(len(clients)) as pool:
            shares = [queries[k :: len(clients)] for k in range(len(clients))]
            for client_results in pool.map(
                lambda client, share: client.search(share), clients, shares
            ):
                assert all(isinstance(hits, list) for hits in client_results)

    search_over_http()
    times = compare(search_over_http, lambda: search_in_process(fresh()), sizes.repeats)
    return Measurement(
        f"bm25 over HTTP, the same {sizes.queries} queries by {len(clients)} callers at once",
        times["times_faster"],
        "times its rate",
        details=times,
    )


def by_vectors(sizes: Sizes) -> Iterator[Measurement]:
    """Measure late interaction: NumPy in this process against the service.

    The service requests the queries' vectors from a server.
    """
    pages = make_pages(sizes.late_pages, sentences())
    ids = [page.page_id for page in pages]
    folder = WORK / f"retrieval/late-{sizes.late_pages}"
    file = WORK / f"retrieval/late-{sizes.late_pages}.safetensors"
    if not file.exists():
        write_vectors(file, ids)
    write_index(folder, pages, [VectorFile(file, MODEL)])
    page_vectors = [of_page(page_id) for page_id in ids]
    ways = (BareMaxSim(page_vectors), PackedMaxSim(page_vectors))
    fresh = Fresh(make_queries(sizes.late_queries, sentences()))
    queries_sent = fresh()
    bare = min(
        ways, key=lambda way: timed(lambda: [way.search(of_query(q), TOP_K) for q in queries_sent])
    )
    with ExitStack() as stack:
        pooling = stack.enter_context(running_app(app))
        flags = ("--index", str(folder), "--cache", "memory", "--late-url", pooling)
        _, url = stack.enter_context(service("services.retriever", *flags))
        client = stack.enter_context(Retriever(url))
        client.search(fresh(), TOP_K)
        times = compare(
            lambda: client.search(fresh(), TOP_K),
            lambda: [bare.search(of_query(query), TOP_K) for query in fresh()],
            sizes.repeats,
        )
        vectors = sum(map(len, page_vectors))
        yield Measurement(
            f"late interaction over HTTP, {sizes.late_queries} queries of 24 vectors over "
            f"{sizes.late_pages} pages of about 700, against a bare MaxSim in process",
            times["times_faster"],
            "times its rate",
            at_least=0.95,
            details=times | {"vectors": vectors, "the faster bare way": type(bare).__name__},
        )
        yield Measurement("  queries a second", sizes.late_queries / times["ours_s"], "queries/s")
        results = client.search(queries_sent, TOP_K)
    numbers = {page_id: k for k, page_id in enumerate(ids)}
    shares = [
        recall(found_pages(hits, numbers), max_sim(of_query(query), page_vectors), TOP_K)
        for query, hits in zip(queries_sent, results, strict=True)
    ]
    yield Measurement(
        f"  recall@{TOP_K} against every page in float64, worst of {len(shares)} queries",
        min(shares),
        "",
        at_least=1.0,
    )


if __name__ == "__main__":
    run("retrieval", __doc__, questions)
