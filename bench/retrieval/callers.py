"""Ask a running retriever from 200 connections at once: searches, pages, whole pictures and parts.

Each connection sends its next call when it has the answer to the last one. Every answer is compared
with what the index gives in this process. No query is sent twice, so no cache helps. The second
part searches an approximate index of late interaction; another server gives the queries' vectors.

    python -m bench.retrieval.callers [--quick]
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from pydantic_core import from_json, to_json

from bench.common import WORK, Measurement, run, service
from bench.retrieval.clustered import ClusteredPages
from bench.retrieval.vectors import MODEL, app
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.backends.late import VectorFile
from services.retriever.backends.opening import Servers
from services.retriever.endpoint import Query, SearchOptions
from services.retriever.index.images import ImageRequest, part_of
from services.retriever.index.ingest import ingest
from services.retriever.index.records import PageRecord
from services.retriever.index.store import Index
from services.retriever.model import RetrieverBackend
from testing.load import Answer, send_and_time
from testing.pairs import ROOT
from testing.retriever_index import make_pages, make_queries, sentences, write_index
from testing.servers import running_app

CALLERS, TOP_K = 200, 10
#: Of 20 calls.
MIX = {"search": 12, "page": 3, "picture": 3, "part of a picture": 2}
PART = ImageRequest((100, 50, 900, 500), 200_000, "jpeg")


class Call(NamedTuple):
    """A request of a kind, and the check of its body."""

    kind: str
    request: bytes
    is_right: Callable[[bytes], bool]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    folder = WORK / "retrieval/callers"
    ingest([ROOT / "demo/search/corpus"], folder, [Bm25Builder("morphemes")])
    count = CALLERS * (2 if quick else 20)
    yield from measured("mixed calls", folder, make_calls(folder, count))
    folder, pages = WORK / "retrieval/callers-late", make_pages(1_000, sentences())
    write_late_index(folder, pages)
    with running_app(app) as pooling:
        backend = RetrieverBackend(folder, servers=Servers(late_url=pooling))
        backend.load()
        queries = make_queries(count // 4, sentences())
        calls = [
            search_call(backend, pages, f"{10**6 + number} {query}")
            for number, query in enumerate(queries)
        ]
        yield from measured("approximate searches", folder, calls, "--late-url", pooling)


def measured(name: str, folder: Path, calls: Sequence[Call], *flags: str) -> Iterator[Measurement]:
    """Serve an index, send the calls, and judge the answers."""
    options = ("--index", str(folder), "--cache", "memory", *flags)
    with service("services.retriever", *options) as (_, url):
        send_and_time(url, [call.request for call in calls[:20]], 1)
        answers, seconds = send_and_time(url, [call.request for call in calls[20:]], CALLERS)
    yield from judged(name, calls[20:], answers, seconds)


def write_late_index(folder: Path, pages: Sequence[PageRecord]) -> None:
    """Write an approximate index of clustered vectors under the pages' ids."""
    from safetensors.numpy import save_file

    file = folder.with_suffix(".safetensors")
    vectors = ClusteredPages(len(pages), 40)
    save_file(dict(zip((page.page_id for page in pages), vectors, strict=True)), file)
    write_index(folder, pages, [VectorFile(file, MODEL, approximate=True)])


def judged(
    name: str, calls: Sequence[Call], answers: Sequence[Answer], seconds: float
) -> Iterator[Measurement]:
    """Count failed and wrong answers, and measure how long each kind took."""
    statuses = Counter(answer.status for answer in answers)
    assert len(answers) == len(calls), "a call has no answer"
    wrong = sum(
        answer.status == 200 and not calls[answer.index].is_right(answer.body) for answer in answers
    )
    yield Measurement(
        f"{len(calls)} {name} by {CALLERS} callers at once: failed",
        1 - statuses[200] / len(calls),
        "of all",
        at_most=0.0,
        details={f"HTTP {status}": count for status, count in sorted(statuses.items())},
    )
    yield Measurement("  wrong answers", wrong, "", at_most=0.0)
    yield Measurement("  calls a second", len(calls) / seconds, "calls/s")
    for kind in dict.fromkeys(call.kind for call in calls):
        milliseconds = [1000 * a.seconds for a in answers if calls[a.index].kind == kind]
        yield Measurement(
            f"  {kind}: p99",
            float(np.percentile(milliseconds, 99)),
            "ms",
            details={"p50": float(np.median(milliseconds)), "calls": len(milliseconds)},
        )


def make_calls(folder: Path, count: int) -> list[Call]:
    """Return `count` calls in a random order, with the checks of their answers."""
    _, pages, _ = Index(folder).open()
    backend = RetrieverBackend(folder)
    backend.load()
    draw = random.Random(0)
    kinds = [kind for kind, times in MIX.items() for _ in range(times)]
    images = {page.picture: _image(folder, page) for page in pages}
    parts = {name: part_of(png, PART) for name, png in images.items()}
    calls = []
    for number in range(count):
        page, kind = draw.choice(pages), draw.choice(kinds)
        path = f"/v1/pages/{quote(page.page_id, safe='')}"
        if kind == "search":
            calls.append(search_call(backend, pages, f"{10**6 + number} {some_words(page, draw)}"))
        elif kind == "page":
            calls.append(Call(kind, _get(path), _is_page(page)))
        elif kind == "picture":
            calls.append(Call(kind, _get(f"{path}/image"), images[page.picture].__eq__))
        else:
            crop = ",".join(map(str, PART.crop or ()))
            query = f"crop={crop}&max_pixels={PART.max_pixels}&format={PART.format}"
            calls.append(Call(kind, _get(f"{path}/image?{query}"), parts[page.picture].__eq__))
    return calls


def search_call(backend: RetrieverBackend, pages: Sequence[PageRecord], query: str) -> Call:
    """Return a search, to be compared with the ranking of the backend in this process."""
    (encoded,) = backend.encode([Query(query=query)], SearchOptions(TOP_K))
    (outcome,) = backend.forward([encoded])  # type: ignore[list-item]
    assert isinstance(outcome, dict)
    expected = [(pages[number].page_id, score) for number, score in outcome["ranking"]]

    def is_right(body: bytes) -> bool:
        (result,) = from_json(body)["results"]
        return result["ok"] and expected == [(h["page_id"], h["score"]) for h in result["hits"]]

    body = to_json({"queries": [{"query": query}], "top_k": TOP_K})
    head = (
        "POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return Call("search", head.encode() + body, is_right)


def some_words(page: PageRecord, draw: random.Random) -> str:
    """Return up to five words of a page."""
    words = page.text.split() or ["page"]
    return " ".join(draw.sample(words, min(5, len(words))))


def _is_page(page: PageRecord) -> Callable[[bytes], bool]:
    boxes = [box.model_dump() for box in page.boxes]

    def is_right(body: bytes) -> bool:
        answer: dict[str, Any] = from_json(body)
        return (answer["page_id"], answer["boxes"]) == (page.page_id, boxes)

    return is_right


def _image(folder: Path, page: PageRecord) -> bytes:
    return Index(folder).paths.image_path(page.picture).read_bytes()


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


if __name__ == "__main__":
    run("retrieval_callers", __doc__, questions)
