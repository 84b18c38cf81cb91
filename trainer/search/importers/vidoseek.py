"""Import ViDoSeek: questions about PDFs, and SlideVQA in the same form.

Schema: README of Alibaba-NLP/ViDoRAG on GitHub, commit c42b6dd63dcc05b502c0900b4aa4c6af31441c73
(read there). That the file has the rows under the key `examples`, beside
`vidoseek_pdf_document.zip`, is second-hand: from public loaders of Qiuchen-Wang/ViDoSeek (before:
autumncc/ViDoSeek) on the Hugging Face hub at e91a92ba5f38690696c7e66be5c5474b54c6e791. Pages count
from 1. Licence: Apache-2.0, as the dataset card says (second-hand).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scorekit.documents import parse_json
from scorekit.errors import UserError
from trainer.runs.readers import read_rows
from trainer.search.importers.published import (
    SPLIT,
    ImportOptions,
    PdfImporter,
    PublishedQuestion,
    PublishedRow,
    check_keys,
    objects,
)

_KEYS = ("uid", "query", "reference_answer", "meta_info")
_META = ("file_name", "reference_page")
_OPTIONAL_META = ("source_type", "query_type")


class ViDoSeek(PdfImporter):
    """Reads `vidoseek.json` (or a file that is named) and PDFs in a zip or a folder."""

    schema = (
        "https://github.com/Alibaba-NLP/ViDoRAG, README at c42b6dd; files of "
        "https://huggingface.co/datasets/Qiuchen-Wang/ViDoSeek at e91a92b (second-hand)"
    )
    licence = "Apache-2.0 (dataset card, second-hand)"
    has_text = True

    def __init__(self, options: ImportOptions) -> None:
        source = options.source
        file = source if source.is_file() else source / "vidoseek.json"
        super().__init__(options, file, options.images or _pdf_path(source))

    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError."""
        (path,) = self.files
        return self.usable(objects(_rows(path), _KEYS, ()), _question, SPLIT)


def _pdf_path(source: Path) -> Path:
    """Return the only zip file beside the questions; without one, their folder."""
    folder = source.parent if source.is_file() else source
    archives = sorted(folder.glob("*.zip"))
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise UserError(f"{folder}: has {names}. Name the one with the PDFs with --images")
    return archives[0] if archives else folder


def _rows(path: Path) -> list[tuple[str, Any]]:
    """Return (position, row) of a JSON object with `examples`, a JSON array, or JSON lines."""
    try:
        content = parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text. Save the file as UTF-8") from None
    except ValueError:
        return list(read_rows(str(path)))  # JSON lines, or an error with the line
    if isinstance(content, dict) and "uid" not in content:
        check_keys(content, ("examples",), (), str(path))
        content = content["examples"]
    rows = content if isinstance(content, list) else [content]
    return [(f"{path} entry {number}", row) for number, row in enumerate(rows, 1)]


def _question(row: PublishedRow) -> PublishedQuestion:
    if not isinstance(row.cells["meta_info"], Mapping):
        raise UserError(f"{row.position}: meta_info: expected an object of fields")
    meta = PublishedRow(row.cells["meta_info"], row.position)
    check_keys(meta.cells, _META, _OPTIONAL_META, f"{row.position}: meta_info")
    answer = row.cells["reference_answer"]
    answers = row.answers("reference_answer", answer, ("reference_answers", None))
    document = meta.document("file_name")
    return PublishedQuestion(
        position=row.position,
        split=SPLIT,
        id=row.id("uid"),
        question=row.text("query"),
        answers=answers,
        gold=tuple((document, page) for page in meta.pages("reference_page")),
        question_type=meta.label("query_type"),
    )
