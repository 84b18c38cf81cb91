"""Import a published dataset into a new folder, all of it or nothing.

OUT/
    SPLIT.jsonl      questions, in the form of `data.train` and `data.eval`
    pages/           page files, whose ids in an index are the gold page ids
    manifest.json    the source, its schema and licence, counts, and what was left out
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_temporaries, replacing_folder
from scorekit.report.progress import progress_bar
from trainer.runs.readers import shorten
from trainer.search.data import question_row
from trainer.search.importers.mmlongbench import MMLongBenchDoc
from trainer.search.importers.published import (
    Importer,
    ImportOptions,
    PageFolder,
    PublishedQuestion,
)
from trainer.search.importers.slidevqa import SlideVQA
from trainer.search.importers.vidore_v3 import ViDoReV3
from trainer.search.importers.vidoseek import ViDoSeek
from trainer.search.records import Question
from trainer.search.steps.episodes import digest_of

IMPORTERS: dict[str, Callable[[ImportOptions], Importer]] = {
    "slidevqa": SlideVQA,
    "vidoseek": ViDoSeek,
    "mmlongbench": MMLongBenchDoc,
    "vidore_v3": ViDoReV3,
}
SCHEMA_VERSION = 1
PAGES = "pages"
#: Larger files of questions are not hashed: they have images in them.
_MAX_HASHED = 2**28


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import.

    manifest: the content of manifest.json.
    """

    out: Path
    manifest: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Return lines for people: the counts, the licence, and the next commands."""
        lines = []
        for split, counts in self.manifest["splits"].items():
            more = [f"{name.replace('_', ' ')} {n}" for name, n in counts.items() if n]
            lines.append(f"{split}: {', '.join(more)}")
        pages = self.out / PAGES
        lines += [
            f"pages: {self.manifest['pages']} of {self.manifest['documents']} documents",
            f"licence of the data: {self.manifest['licence']}",
            f"index: scorekit ingest {quote(str(pages))} --index {quote(str(self.out / 'index'))}",
        ]
        if not self.manifest["has_text"]:
            lines.append(
                "The pages are images without text: bm25 needs --ocr; --backend late does not."
            )
        first = next(iter(self.manifest["splits"]))
        setting = quote(f"data.train={self.out / first}.jsonl")
        lines.append(f"questions: --set {setting} (or data.eval)")
        return lines


def run_import(
    dataset: str,
    options: ImportOptions,
    out: Path,
    *,
    leave_out: bool = False,
    keep_unanswerable: bool = False,
) -> Imported:
    """Write the folder `out`; a run that ends early leaves nothing there.

    leave_out: leave out what cannot be used, in place of refusing the dataset.
    keep_unanswerable: keep questions that their documents do not answer.

    Raises UserError with a line for each problem, and if `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: already exists. Delete it, or name a new folder with --out")
    if not options.source.exists():
        raise UserError(f"{options.source}: no such file or folder")
    if options.language is not None and dataset != "vidore_v3":
        raise UserError("--language: only vidore_v3 has questions in several languages")
    if keep_unanswerable and dataset != "mmlongbench":
        raise UserError("--keep-unanswerable: only mmlongbench has questions without an answer")
    importer = IMPORTERS[dataset](options)
    questions = importer.questions()
    remove_temporaries(out.parent, escape(out.name))
    with replacing_folder(out) as folder:
        pages = PageFolder(folder / PAGES)
        with progress_bar(importer.num_steps()) as step:
            importer.write_pages(pages, step)
        usable, errors = _usable(questions, pages)
        problems = [*importer.problems, *errors, *pages.errors]
        if problems and not leave_out:
            advice = "Nothing was written. Correct the files, or set --leave-out"
            raise UserError(
                f"{options.source}: {len(problems)} problems. {advice}:", shorten(problems)
            )
        selected = [item for item in usable if item.is_answerable or keep_unanswerable]
        if not selected:
            raise UserError(f"{options.source}: no question remains", shorten(problems))
        _write_questions(folder, selected)
        rows = importer.num_rejected + Counter(item.split for item in questions)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "dataset": dataset,
            "source": str(options.source),
            "schema": importer.schema,
            "licence": importer.licence,
            "has_text": importer.has_text,
            "files": {str(path): _digest(path) for path in importer.files},
            "documents": sum(map(bool, pages.num_pages.values())),
            "pages": pages.count,
            "left_out": problems,
            "splits": _counts(rows, usable, selected),
        }
        text = json.dumps(manifest, ensure_ascii=False, indent=1) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
    return Imported(out, manifest)


def _usable(
    questions: Sequence[PublishedQuestion], pages: PageFolder
) -> tuple[list[PublishedQuestion], list[str]]:
    """Return the questions with a new id whose gold pages all exist, and a line for each other."""
    usable, errors = [], []
    first_positions: dict[tuple[str, str], str] = {}
    for question in questions:
        first = first_positions.setdefault((question.split, question.id), question.position)
        if first != question.position:
            errors.append(f"{question.position}: the id {question.id!r} is in {first}, too")
            continue
        causes = [cause for page in question.gold if (cause := pages.problem_of(*page))]
        errors += [f"{question.position}: {cause}" for cause in causes]
        if not causes:
            usable.append(question)
    return usable, errors


def _write_questions(folder: Path, questions: Sequence[PublishedQuestion]) -> None:
    splits: dict[str, list[str]] = {}
    for item in questions:
        row = question_row(as_question(item))
        splits.setdefault(item.split, []).append(json.dumps(row, ensure_ascii=False) + "\n")
    for split, lines in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def as_question(item: PublishedQuestion) -> Question:
    """Return a published question as the project's record."""
    documents = {document for document, _ in item.gold}
    is_one_file = len(documents) == 1
    return Question(
        id=item.id,
        question=item.question,
        reference_answer=item.answers[0],
        other_answers=item.answers[1:],
        file_name=f"{next(iter(documents))}.pdf" if is_one_file else "",
        reference_pages=tuple(page for _, page in item.gold) if is_one_file else (),
        gold=tuple(f"{document}_{page}" for document, page in item.gold),
        question_type=item.question_type,
    )


def _counts(
    rows: Mapping[str, int],
    usable: Sequence[PublishedQuestion],
    selected: Sequence[PublishedQuestion],
) -> dict[str, dict[str, int]]:
    """Return the counts of each split.

    rows: number of published rows by split.
    """
    num_usable, num_selected = (
        Counter(item.split for item in items) for items in (usable, selected)
    )
    return {
        split: {
            "questions": num_selected[split],
            "left_out": num_rows - num_usable[split],
            "unanswerable_left_out": num_usable[split] - num_selected[split],
            "unanswerable": sum(not q.is_answerable for q in selected if q.split == split),
            "without_gold_page": sum(not q.gold for q in selected if q.split == split),
            "with_several_answers": sum(len(q.answers) > 1 for q in selected if q.split == split),
        }
        for split, num_rows in sorted(rows.items())
    }


def _digest(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _MAX_HASHED:
        return {"bytes": size}
    return {"bytes": size, "sha256": digest_of(path)}
