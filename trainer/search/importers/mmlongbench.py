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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from trainer.runs.readers import read_rows
from trainer.search.data import page_numbers, reference_answers
from trainer.search.importers.page_folder import PageFolder
from trainer.search.importers.pdf_files import PdfFiles
from trainer.search.importers.published import (
    ImportOptions,
    Published,
    PublishedQuestion,
    Rejected,
    chosen_splits,
    document_name,
    objects,
    text_of,
    usable,
)

SPLIT = "test"
_KEYS = ("doc_id", "question", "answer", "evidence_pages", "answer_format")
_OPTIONAL = ("doc_type", "evidence_sources")
_FORMATS = ("Str", "Int", "Float", "List", "None")
#: Type of the questions without an answer, in place of the published `None`.
UNANSWERABLE = "unanswerable"


class MMLongBenchDoc:
    """Reads `samples.json` or the hub's Parquet file, and the folder `documents` of PDFs."""

    published = Published(
        schema="https://github.com/mayubo2333/MMLongBench-Doc at 04524e7 and 88b5f09; "
        "https://huggingface.co/datasets/yubo2333/MMLongBench-Doc at 38bceac",
        licence="CC BY-NC 4.0, research only",
        has_text=True,
    )

    def __init__(self, options: ImportOptions) -> None:
        self.options = options
        self.rejected = Rejected()
        self.files = [_question_file(options.source)]
        self._pdfs = PdfFiles(options.images or _pdf_path(options.source))

    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError."""
        (path,) = self.files
        chosen_splits({SPLIT: [path]}, self.options)
        rows = enumerate(objects(read_rows(str(path)), _KEYS, _OPTIONAL), 1)
        numbered = [(position, (number, row)) for number, (position, row) in rows]
        return usable(numbered, _question, self.rejected, SPLIT)

    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write all PDFs."""
        for _ in self._pdfs.write(pages):
            step(1)

    def num_steps(self) -> int:
        """Return the number of PDFs."""
        return len(self._pdfs)


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


def _question(numbered: tuple[int, Mapping[str, Any]], position: str) -> PublishedQuestion:
    number, row = numbered
    document = document_name(text_of(row, "doc_id", position), position, "doc_id")
    answer_format = text_of(row, "answer_format", position)
    if answer_format not in _FORMATS:
        raise UserError(
            f"{position}: answer_format: {answer_format!r:.40}: expected {', '.join(_FORMATS)}"
        )
    answer = _literal(row["answer"], position) if answer_format == "List" else row["answer"]
    is_list = isinstance(answer, list)
    answers = reference_answers(
        ("answer", None if is_list else answer), ("answer", [answer] if is_list else None), position
    )
    if not answers:
        raise UserError(f"{position}: answer: empty")
    is_answerable = answer_format != "None"
    pages = page_numbers(row["evidence_pages"], position, "evidence_pages")
    return PublishedQuestion(
        position=position,
        split=SPLIT,
        id=f"mmlongbench-{number:04d}",  # the rows have no id
        question=text_of(row, "question", position),
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
        parts = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UserError(f"{position}: answer: not a list: {value!r:.60}") from None
    return parts
