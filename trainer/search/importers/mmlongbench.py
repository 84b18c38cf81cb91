"""Import MMLongBench-Doc: questions about long PDFs, of which some have no answer.

Schema: README and data/samples.json of mayubo2333/MMLongBench-Doc on GitHub, commit
04524e716d3d2bc837b2bfcf9b2291a4023b8ad4 (parts of the file also at
88b5f09fd29a7638b7c4d82aa6c8f5989ca5c145), and the card of yubo2333/MMLongBench-Doc on the Hugging
Face hub at 38bceac8784469e70ad783dbf26c0b6ff08e0a9a (both read there): all columns are texts, lists
are written as Python writes them, pages count from 1. The hub calls its only split `train`; it is a
benchmark, and is `test` here. Licence: CC BY-NC 4.0, for research only (README).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from trainer.runs.readers import read_rows
from trainer.search.data import page_numbers
from trainer.search.importers.published import (
    SPLIT,
    ImportOptions,
    PdfImporter,
    PublishedQuestion,
    PublishedRow,
    objects,
)

_KEYS = ("doc_id", "question", "answer", "evidence_pages", "answer_format")
_OPTIONAL = ("doc_type", "evidence_sources")
_FORMATS = ("Str", "Int", "Float", "List", "None")
#: Type of the questions without an answer, in place of the published `None`.
UNANSWERABLE = "unanswerable"


class MMLongBenchDoc(PdfImporter):
    """Reads `samples.json` or the hub's Parquet file, and the folder `documents` of PDFs."""

    schema = (
        "https://github.com/mayubo2333/MMLongBench-Doc at 04524e7 and 88b5f09; "
        "https://huggingface.co/datasets/yubo2333/MMLongBench-Doc at 38bceac"
    )
    licence = "CC BY-NC 4.0, research only"
    has_text = True

    def __init__(self, options: ImportOptions) -> None:
        file = _question_file(options.source)
        super().__init__(options, file, options.images or _pdf_path(options.source))

    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError."""
        (path,) = self.files
        rows = objects(read_rows(str(path)), _KEYS, _OPTIONAL)
        return self.usable(enumerate(rows, 1), _question, SPLIT)


def _question_file(source: Path) -> Path:
    if source.is_file():
        return source
    for name in ("data/samples.json", "samples.json"):
        if (source / name).is_file():
            return source / name
    files = sorted((source / "data").glob("train-*.parquet"))
    if len(files) == 1:
        return files[0]
    raise UserError(f"{source}: has neither data/samples.json nor one file data/train-*.parquet")


def _pdf_path(source: Path) -> Path:
    folder = source.parent if source.is_file() else source
    for name in ("documents", "data/documents"):
        if (folder / name).is_dir():
            return folder / name
    return folder


def _question(numbered: tuple[int, PublishedRow]) -> PublishedQuestion:
    number, row = numbered
    cells, position = row.cells, row.position
    document = row.document("doc_id")
    answer_format = row.text("answer_format")
    if answer_format not in _FORMATS:
        raise UserError(
            f"{position}: answer_format: {answer_format!r:.40}: expected {', '.join(_FORMATS)}"
        )
    answer = _literal(cells["answer"], position) if answer_format == "List" else cells["answer"]
    first, further = (None, [answer]) if isinstance(answer, list) else (answer, None)
    answers = row.answers("answer", first, ("answer", further))
    is_answerable = answer_format != "None"
    pages = page_numbers(cells["evidence_pages"], position, "evidence_pages")
    return PublishedQuestion(
        position=position,
        split=SPLIT,
        id=f"mmlongbench-{number:04d}",  # the rows have no id
        question=row.text("question"),
        answers=answers,
        gold=tuple((document, page) for page in pages),
        question_type=answer_format if is_answerable else UNANSWERABLE,
        is_answerable=is_answerable,
    )


def _literal(value: Any, position: str) -> Any:
    """Return the list that a text holds as Python writes it; other values as they are."""
    if not isinstance(value, str) or not value.strip().startswith("["):
        return value
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UserError(f"{position}: answer: not a list: {value!r:.60}") from None
