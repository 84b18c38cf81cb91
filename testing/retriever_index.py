"""Pages and queries to measure with: real sentences, English and Korean, drawn by a seed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from scorekit.retrieval.wire import TextBox
from services.retriever.index.ingest import IndexBuilder
from services.retriever.index.records import Manifest, PageRecord
from services.retriever.index.store import Index
from testing.pairs import ROOT

LINES = 12
_PICTURE = hashlib.sha256(b"").hexdigest()  # no picture is asked for


def sentences() -> list[str]:
    """Return sentences of Python's documentation, in English and in Korean."""
    rows = (ROOT / "demo/data/pydocs.jsonl").read_text(encoding="utf-8").splitlines()
    return [text for row in map(json.loads, rows) for text in (row["src_text"], row["ref_text"])]


def make_pages(count: int, texts: Sequence[str]) -> list[PageRecord]:
    """Return pages of `LINES` sentences each, ten per document."""
    draw = random.Random(count)
    pages = []
    for number in range(count):
        lines = [
            TextBox(text=text, x1=0, y1=20 * k, x2=900, y2=20 * k + 16, letter_height=12)
            for k, text in enumerate(draw.sample(texts, LINES))
        ]
        document, page = f"document{number // 10}", number % 10 + 1
        pages.append(
            PageRecord(
                page_id=f"{document}_{page}",
                document=document,
                page=page,
                width=900,
                height=300,
                picture=_PICTURE,
                boxes=lines,
            )
        )
    return pages


def make_queries(count: int, texts: Sequence[str]) -> list[str]:
    """Return queries of six adjacent words of a sentence each."""
    draw = random.Random(-count)
    queries: list[str] = []
    while len(queries) < count:
        words = draw.choice(texts).split()
        first = draw.randrange(max(1, len(words) - 5))
        queries.append(" ".join(words[first : first + 6]))
    return queries


def write_index(
    folder: Path, pages: Sequence[PageRecord], builders: Sequence[IndexBuilder]
) -> None:
    """Write an index of these pages, as `ingest` publishes it."""
    index = Index(folder)
    with index.writing(), index.new_state() as state:
        built_backends = {}
        for builder in builders:
            (state / builder.name).mkdir()
            built_backends[builder.name] = builder.build(pages, state / builder.name, index.paths)
        manifest = Manifest(
            id=folder.name,
            revision="",
            pages=len(pages),
            documents=len({page.document for page in pages}),
            backends=built_backends,
        )
        index.publish(state, pages, manifest)
