"""Import SlideVQA: questions about slide decks of up to 20 images.

Two published forms:

- GitHub, nttmdlab-nlp/SlideVQA: `annotations/qa/SPLIT.jsonl` (train, dev, test), and the images
  that its script downloads, `images/SPLIT/DECK/` with the last part of each URL in `image_urls`.
  Schema: README at 0d4168a935d60b0b218097205a02fb1133c8bead and the script at
  e223fb2a998bfd1a512ce4850072df23f81c4eb8 (read there).
- Hugging Face hub, NTT-hil-insight/SlideVQA at e780ea258d734958befbfaed19fa059584642ca8:
  `data/SPLIT-*.parquet` (train 10,617 rows, val 1,652, test 2,215) with the columns of the first
  form and `page_1` to `page_20`. It is gated: columns and counts are second-hand, from public
  loaders and an inventory.

Pages count from 1: page n is the n-th URL. Licence: NTT's agreement for evaluation (LICENSE on
GitHub): internal use, no copies for others. The slides are their authors'.

The 6,667 questions that the requirements train on are not a published split. They are a selection
in the form of ViDoSeek or of veRL: `import vidoseek FILE` reads the first, `data.train` the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from scorekit.errors import UserError
from trainer.runs.readers import kind_of, read_rows, split_files
from trainer.search.importers.published import (
    Importer,
    ImportOptions,
    PageFolder,
    PublishedQuestion,
    PublishedRow,
    check_keys,
    chosen_splits,
    image_of,
    objects,
    parquet_columns,
    parquet_rows,
)

_KEYS = ("deck_name", "qa_id", "question", "answer", "evidence_pages")
_URLS = "image_urls"
_MORE = ("deck_url", "arithmetic_expression", "reasoning_type", "answer_type")
_IMAGES = tuple(f"page_{number}" for number in range(1, 21))


class SlideVQA(Importer):
    """Reads SlideVQA in either published form."""

    schema = (
        "https://github.com/nttmdlab-nlp/SlideVQA at 0d4168a; "
        "https://huggingface.co/datasets/NTT-hil-insight/SlideVQA at e780ea2 (second-hand)"
    )
    licence = "NTT software license agreement for evaluation: internal use, no distribution"
    has_text = False

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._splits = chosen_splits(_files(options.source), options)
        self.files = [file for files in self._splits.values() for file in files]
        self._is_parquet = kind_of(self.files[0]) == ".parquet"
        if self._is_parquet and options.images is not None:
            raise UserError("--images: the images are in the rows of these Parquet files")
        #: (split, deck) -> its URLs and where they were read, in the form of GitHub.
        self._decks: dict[tuple[str, str], tuple[list[str], str]] = {}
        self._num_rows = 0

    def questions(self) -> list[PublishedQuestion]:
        """Return the questions. Raises UserError."""
        questions = []
        for split, files in self._splits.items():
            parse = partial(self._question, split=split)
            for file in files:
                questions += self.usable(self._rows(file), parse, split)
        return questions

    def write_pages(self, pages: PageFolder, step: Callable[[int], None]) -> None:
        """Write the images of all decks of these splits."""
        if self._is_parquet:
            for file in self.files:
                for row in parquet_rows(file, ("deck_name", *_IMAGES)):
                    self._write_row(row, pages)
                    step(1)
            return
        source = self.options.source
        if self.options.images is None and source.is_file():
            raise UserError(f"{source}: name the folder of its images with --images")
        root = self.options.images or source / "images"
        for (split, deck), (urls, position) in self._decks.items():
            for page, url in enumerate(urls, 1):
                path = _image_path(root, split, deck, url)
                content = path.read_bytes() if path.is_file() else None
                pages.add_image(deck, page, content, f"{position}: {path}")
            step(1)

    def num_steps(self) -> int:
        """Return the number of rows of Parquet, or of decks."""
        return self._num_rows if self._is_parquet else len(self._decks)

    def _rows(self, file: Path) -> Iterator[PublishedRow]:
        if not self._is_parquet:
            yield from objects(read_rows(str(file)), (*_KEYS, _URLS), _MORE)
            return
        columns = parquet_columns(file)
        check_keys(columns, (*_KEYS, *_IMAGES), (_URLS, *_MORE), str(file))
        texts = [name for name in columns if name not in _IMAGES]
        for row in parquet_rows(file, texts):
            self._num_rows += 1
            yield row

    def _question(self, row: PublishedRow, split: str) -> PublishedQuestion:
        deck = row.document("deck_name")
        if not self._is_parquet:
            self._add_deck(row.cells[_URLS], split, deck, row.position)
        answers = row.answers("answer", row.cells["answer"], ("answer", None))
        return PublishedQuestion(
            position=row.position,
            split=split,
            id=row.id("qa_id"),
            question=row.text("question"),
            answers=answers,
            gold=tuple((deck, page) for page in row.pages("evidence_pages")),
            question_type=row.label("reasoning_type"),
        )

    def _add_deck(self, urls: Any, split: str, deck: str, position: str) -> None:
        if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
            raise UserError(f"{position}: {_URLS}: expected a list of addresses")
        first_urls, first = self._decks.setdefault((split, deck), (urls, position))
        if first_urls != urls:
            raise UserError(f"{position}: {_URLS}: {deck!r} has others in {first}")

    def _write_row(self, row: PublishedRow, pages: PageFolder) -> None:
        try:
            deck = row.document("deck_name")
        except UserError:  # `questions` has listed it
            return
        contents = [image_of(row.cells[name]) for name in _IMAGES]
        while contents and contents[-1] is None:  # a deck may have fewer images
            contents.pop()
        for page, content in enumerate(contents, 1):
            pages.add_image(deck, page, content, f"{row.position}: page_{page}")


def _files(source: Path) -> dict[str, list[Path]]:
    if source.is_file():
        return {source.stem: [source]}
    for folder in ("annotations/qa", "qa", "data", "."):
        if files := split_files(source / folder):
            return files
    return {}


def _image_path(root: Path, split: str, deck: str, url: str) -> Path:
    """Return the path of a downloaded image; the split's folder may be left out.

    Only the last part of the URL counts, so that no URL leads out of the deck's folder.
    """
    name = PurePosixPath(unquote(urlsplit(url).path)).name or "-"
    with_split = root / split / deck / name
    without_split = root / deck / name
    return without_split if not with_split.exists() and without_split.exists() else with_split
