"""Writes small made-up datasets in the published shapes, for tests of the importers."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from tests.kits.retrieval.pdf import draw_pdf

#: Names of decks as people give them.
KOREAN, CHINESE = "2023년 매출 보고서", "年度报告-销售额"


def image_of(shade: int, format: str = "PNG") -> bytes:
    """Return a small image.

    shade: its color, which tests can read back.
    """
    written = BytesIO()
    Image.new("RGB", (32, 24), (shade, 60, 120)).save(written, format)
    return written.getvalue()


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]], encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding)
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def slide_url(deck: str, page: int) -> str:
    return f"https://image.example.com/{deck}/95/{deck}-{page}-1024.jpg?cb=1"


def slide_row(qa_id: int, deck: str, pages: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return a row of SlideVQA as GitHub has it, of a deck of three images."""
    return {
        "deck_name": deck,
        "deck_url": f"https://www.example.com/{deck}",
        "image_urls": [slide_url(deck, page) for page in (1, 2, 3)],
        "qa_id": qa_id,
        "question": f"What is question {qa_id}?",
        "answer": f"answer {qa_id}",
        "arithmetic_expression": "None",
        "evidence_pages": list(pages),
        "reasoning_type": "Single-Hop",
        "answer_type": "Single-Span",
    } | fields


def write_slides(root: Path, split: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a split and the images of its decks as the published script would download them."""
    for number, deck in enumerate(dict.fromkeys(row["deck_name"] for row in rows)):
        folder = root / "images" / split / deck
        if ".." in deck or "/" in deck:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for page in (1, 2, 3):
            shade = 10 * number + page
            (folder / f"{deck}-{page}-1024.jpg").write_bytes(image_of(shade))
    return write_lines(root / "annotations" / "qa" / f"{split}.jsonl", rows)


def hub_slide_row(qa_id: int, deck: str, pages: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return a row of SlideVQA as the hub has it: twenty columns of images, here three in use."""
    row = slide_row(qa_id, deck, pages)
    del row["image_urls"]
    images = {
        f"page_{page}": {"bytes": image_of(len(deck) + page), "path": f"{page}.jpg"}
        if page <= 3
        else None
        for page in range(1, 21)
    }
    return row | images | fields


def seek_row(uid: str, file_name: str, pages: Any, **fields: Any) -> dict[str, Any]:
    """Return a row of ViDoSeek."""
    meta = {"file_name": file_name, "reference_page": pages}
    return {
        "uid": uid,
        "query": f"What is {uid}?",
        "reference_answer": "195-205 Centigrade",
        "meta_info": meta | {"source_type": "Text", "query_type": "Multi-Hop"},
    } | fields


def write_seek(root: Path, rows: Sequence[Mapping[str, Any]], documents: Mapping[str, int]) -> None:
    """Write vidoseek.json and a zip of PDFs.

    documents: name -> number of pages.
    """
    root.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"examples": list(rows)}, ensure_ascii=False)
    (root / "vidoseek.json").write_text(content, encoding="utf-8")
    with zipfile.ZipFile(root / "vidoseek_pdf_document.zip", "w") as archive:
        for name, pages in documents.items():
            pdf = draw_pdf(root / "drawn", [[f"{name} {page}"] for page in range(pages)])
            archive.writestr(f"vidoseek_pdf_document/{name}", pdf.read_bytes())
            pdf.unlink()


def long_row(document: str, answer: Any, format: str, pages: Any, **fields: Any) -> dict[str, Any]:
    """Return a row of MMLongBench-Doc."""
    return {
        "doc_id": document,
        "doc_type": "Research report / Introduction",
        "question": f"What is {answer}?",
        "answer": answer,
        "evidence_pages": pages,
        "evidence_sources": "['Chart']",
        "answer_format": format,
    } | fields


def write_long(root: Path, rows: Sequence[Mapping[str, Any]], documents: Mapping[str, int]) -> None:
    """Write data/samples.json and data/documents as GitHub has them."""
    (root / "data" / "documents").mkdir(parents=True)
    for name, pages in documents.items():
        lines = [[f"{name} {page}"] for page in range(pages)]
        draw_pdf(root / "data" / "documents" / name, lines)
    text = json.dumps(list(rows), ensure_ascii=False, indent=4)
    (root / "data" / "samples.json").write_text(text, encoding="utf-8")


def corpus_row(corpus_id: int, document: str, number: int, **fields: Any) -> dict[str, Any]:
    """Return a page of ViDoRe v3.

    number: the first page is 0.
    """
    return {
        "corpus_id": corpus_id,
        "image": {"bytes": image_of(corpus_id), "path": None},
        "doc_id": document,
        "markdown": "",
        "page_number_in_doc": number,
    } | fields


def query_row(query_id: int, **fields: Any) -> dict[str, Any]:
    """Return a question of ViDoRe v3."""
    return {
        "query_id": query_id,
        "query": f"What is {query_id}?",
        "language": "english",
        "query_types": ["multi-hop", "numerical"],
        "query_format": "question",
        "content_type": ["Table"],
        "raw_answers": ["about 12 percent", "12 %"],
        "query_generator": "human",
        "query_generation_pipeline": "",
        "source_type": "image",
        "query_type_for_generation": "numerical",
        "answer": "12 %",
    } | fields


def qrel_row(query_id: int, corpus_id: int, score: int = 2, **fields: Any) -> dict[str, Any]:
    """Return a relevance of ViDoRe v3."""
    boxes = [{"annotator": 0, "x1": 0, "x2": 9, "y1": 0, "y2": 9}]
    return {
        "query_id": query_id,
        "corpus_id": corpus_id,
        "score": score,
        "content_type": ["Table"],
        "bounding_boxes": boxes,
    } | fields


def write_vidore(
    root: Path,
    corpus: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    qrels: Sequence[Mapping[str, Any]],
) -> None:
    """Write the folders of a dataset of ViDoRe v3; the corpus in two shards."""
    half = (len(corpus) + 1) // 2
    for number, rows in enumerate((corpus[:half], corpus[half:])):
        write_parquet(root / "corpus" / f"test-0000{number}-of-00002.parquet", rows)
    write_parquet(root / "queries" / "test-00000-of-00001.parquet", queries)
    write_parquet(root / "qrels" / "test-00000-of-00001.parquet", qrels)
