"""Import a dataset of ViDoRe v3: questions, page images and graded relevance of pages.

Schema: the card of vidore/vidore_v3_pharmaceuticals on the Hugging Face hub (read in a mirror; its
revision is not known), which has the folders `corpus`, `queries`, `qrels` and
`documents_metadata` of Parquet files with the only split `test`. Second-hand, from a survey of the
hub's API in 2026-10 (vidore_v3_hr at 0cdf0979f2c5a0fd3e335e6373b9da48a9fe3bc3, vidore_v3_finance_en
at 7f432c176d82e27546501ad8064a713ac3071809): all eight public datasets have these columns,
`page_number_in_doc` begins with 0, and a score of relevance is 1 or 2. Licence: CC BY 4.0; that of
the documents is in `documents_metadata`.

A question exists in six languages, each a row with its own id. All pages with a score of at least 1
are gold. `answer` is the reference, and the answers of the annotators (`raw_answers`) are right,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scorekit.errors import UserError
from trainer.runs.readers import split_files
from trainer.search.importers.published import (
    Importer,
    ImportOptions,
    PageFolder,
    PublishedQuestion,
    PublishedRow,
    check_keys,
    chosen_splits,
    image_of,
    parquet_columns,
    parquet_rows,
)

SPLIT = "test"
_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "corpus": (("corpus_id", "image", "doc_id", "page_number_in_doc"), ("markdown",)),
    "queries": (
        ("query_id", "query", "language", "answer"),
        (
            *("query_types", "query_format", "content_type", "raw_answers", "query_generator"),
            *("query_generation_pipeline", "source_type", "query_type_for_generation"),
        ),
    ),
    "qrels": (("query_id", "corpus_id", "score"), ("content_type", "bounding_boxes")),
}


class ViDoReV3(Importer):
    """Reads the folder of one dataset of ViDoRe v3."""

    schema = (
        "https://huggingface.co/datasets/vidore/vidore_v3_pharmaceuticals (card, in a "
        "mirror; vidore_v3_hr at 0cdf097 and vidore_v3_finance_en at 7f432c1 second-hand)"
    )
    licence = "CC BY 4.0; that of the documents is in documents_metadata"
    has_text = False

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        if options.images is not None:
            raise UserError("--images: the images of vidore_v3 are in its folder corpus")
        self._files = {name: self._published_files(name) for name in _COLUMNS}
        self.files = [*self._files["queries"], *self._files["qrels"]]
        self._num_rows = 0
        self._pages: dict[str, tuple[str, int]] = {}

    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError."""
        for file in self._files["corpus"]:
            for row in parquet_rows(file, ("corpus_id", "doc_id", "page_number_in_doc")):
                self._num_rows += 1
                self._add_page(row)
        gold, incomplete = self._gold()
        columns = parquet_columns(self._files["queries"][0])
        queries = [
            row
            for file in self._files["queries"]
            for row in parquet_rows(file, columns)
            if self.options.language in (None, row.cells["language"])
        ]
        if not queries:
            raise UserError(f"--language {self.options.language}: no question has that language")

        def parse(row: PublishedRow) -> PublishedQuestion:
            question = _question(row, gold)
            if question.id in incomplete:
                raise UserError(f"{row.position}: query_id: a gold page of it is not in the corpus")
            return question

        return self.usable(queries, parse, SPLIT)

    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write all page images."""
        for file in self._files["corpus"]:
            for row in parquet_rows(file, ("corpus_id", "image")):
                step(1)
                page = self._pages.get(str(row.cells["corpus_id"]))
                if page is not None:  # else `questions` has listed it
                    pages.add_image(*page, image_of(row.cells["image"]), row.position)

    def num_steps(self) -> int:
        """Return the number of pages."""
        return self._num_rows

    def _published_files(self, name: str) -> list[Path]:
        folder = self.options.source / name
        files = chosen_splits(split_files(folder) if folder.is_dir() else {}, self.options)
        if list(files) != [SPLIT]:
            raise UserError(f"{folder}: expected the split {SPLIT}, not {', '.join(files)}")
        for file in files[SPLIT]:
            check_keys(parquet_columns(file), *_COLUMNS[name], str(file))
        return files[SPLIT]

    def _add_page(self, row: PublishedRow) -> None:
        position = row.position
        try:
            corpus_id = row.id("corpus_id")
            document = row.document("doc_id")
            number = row.cells["page_number_in_doc"]
            if not isinstance(number, int) or number < 0:
                raise UserError(
                    f"{position}: page_number_in_doc: expected a whole number >= 0, not {number!r}"
                )
            if corpus_id in self._pages:
                raise UserError(f"{position}: corpus_id: {corpus_id} exists twice")
        except UserError as error:
            self.problems.append(str(error))
        else:
            self._pages[corpus_id] = document, number + 1

    def _gold(self) -> tuple[dict[str, list[tuple[str, int]]], set[str]]:
        """Return the gold pages of each query, and the queries with one that does not exist."""
        gold: dict[str, list[tuple[str, int]]] = {}
        incomplete = set()
        for file in self._files["qrels"]:
            for row in parquet_rows(file, ("query_id", "corpus_id", "score")):
                query_id, corpus_id = str(row.cells["query_id"]), row.cells["corpus_id"]
                page = self._pages.get(str(corpus_id))
                if page is None:
                    incomplete.add(query_id)
                    self.problems.append(
                        f"{row.position}: corpus_id: the corpus has no page {corpus_id}"
                    )
                elif row.cells["score"] and row.cells["score"] > 0:
                    gold.setdefault(query_id, []).append(page)
        return gold, incomplete


def _question(row: PublishedRow, gold: Mapping[str, list[tuple[str, int]]]) -> PublishedQuestion:
    query_id = row.id("query_id")
    raw_answers = row.cells.get("raw_answers") or ()
    further = [answer for answer in raw_answers if answer and answer.strip()]
    answers = row.answers("answer", row.cells["answer"], ("raw_answers", further))
    return PublishedQuestion(
        position=row.position,
        split=SPLIT,
        id=query_id,
        question=row.text("query"),
        answers=answers,
        gold=tuple(dict.fromkeys(gold.get(query_id, ()))),
        question_type=row.label("query_types"),
    )
