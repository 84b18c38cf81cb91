"""Read questions and their gold pages from the rows of a file, a folder or a hub data set."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.text.markup import normalized
from trainer.runs.readers import (
    cell,
    clean_cell,
    id_cell,
    parse_rows,
    read_rows,
    row_ids,
    shorten,
    text_cell,
)
from trainer.search.config import COLUMNS, SearchConfig, SearchData
from trainer.search.records import Question

log = logging.getLogger(__name__)
#: Max concurrent look-ups of pages.
_AT_ONCE = 8


def load_questions(
    source: str, data: SearchData, *, split: str | None = None, limit: int | None = None
) -> list[Question]:
    """Read questions.

    source: a file, a folder (see trainer/runs/readers.py for the formats), or a hub id.
    split: name of a split of a folder or hub data set.
    limit: max rows to read.

    A missing id becomes a hash of the row. Raises UserError with a line for each wrong row, its
    number, the problem, and what to do, unless data.bad_rows skips them.
    """
    rows = islice(read_rows(source, split, with_bad=True), limit)
    questions = parse_rows(source, rows, partial(_question, data=data), data.bad_rows)
    return _with_ids(source, questions)


def load_train(cfg: SearchConfig, limit: int | None = None) -> list[Question]:
    """Return the training questions, at most `limit` of them. Raises UserError."""
    data = cfg.data
    if data.train is None:
        raise UserError("data.train: not set. Give a file of questions.")
    limits = [max_rows for max_rows in (data.train_limit, limit) if max_rows is not None]
    return load_questions(data.train, data, split=data.train_split, limit=min(limits, default=None))


def load_held_out(cfg: SearchConfig) -> dict[str, list[Question]]:
    """Return the questions of each evaluation set by name. Raises UserError."""
    return {name: load_set(cfg, name) for name in cfg.data.held_out}


def load_set(cfg: SearchConfig, name: str) -> list[Question]:
    """Return the questions of the evaluation set `name`. Raises UserError."""
    question_set = cfg.data.held_out[name]
    return load_questions(
        question_set.path, cfg.data, split=question_set.split, limit=cfg.eval.eval_limit
    )


def gold_pages(file_name: str, pages: Sequence[int]) -> tuple[str, ...]:
    """Return the page ids of pages of a file; its first page is 1.

    An id is the file's name without folders and `.pdf`, then `_` and the page number. It is in NFC,
    as in an index.
    """
    name = normalized("NFC", PurePosixPath(file_name.replace("\\", "/")).name)
    stem = name[:-4] if name.lower().endswith(".pdf") else name
    return tuple(dict.fromkeys(f"{stem}_{page}" for page in pages))


def hold_against_index(
    questions: Sequence[Question], has_page: Callable[[str], bool], data: SearchData
) -> list[Question]:
    """Return the questions whose gold pages and alternatives are all in the index.

    has_page: is called once for each page, from several threads. The other questions are left out,
    which is logged, or raise UserError with a line for each (data.missing_gold: refuse).
    """
    page_ids = {name: None for question in questions for name in _named_pages(question)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        is_indexed = dict(zip(page_ids, pool.map(has_page, page_ids), strict=True))
    errors, usable = [], []
    for question in questions:
        missing = [name for name in _named_pages(question) if not is_indexed[name]]
        if missing:
            errors.append(f"{question.id}: the index has no page {missing[0]!r}")
        else:
            usable.append(question)
    if not errors:
        return usable
    summary = f"{len(errors)} of {len(questions)} questions name a page that is not in the index"
    if data.missing_gold == "refuse":
        advice = "Ingest its file, correct the row, or set data.missing_gold to leave_out"
        raise UserError(f"{summary}. {advice}:", shorten(errors))
    if not usable:
        raise UserError(f"{summary}: no question remains", shorten(errors))
    log.warning("%s: they are left out: %s", summary, "; ".join(shorten(errors)))
    return usable


def check_gold(questions: Sequence[Question], w_ndcg: float) -> None:
    """Warn about questions without a gold page: they have no reward if NDCG has a weight.

    Raises UserError if that is so for all questions.
    """
    num_without = sum(not question.gold for question in questions)
    if not (num_without and w_ndcg):
        return
    summary = (
        f"{num_without} of {len(questions)} questions name no gold page (file_name, reference_page)"
    )
    if num_without == len(questions):
        raise UserError(
            f"{summary}, and NDCG has the weight {w_ndcg:g}. Name their columns in data.columns "
            "or set reward.w_ndcg to 0 (preset focused)."
        )
    log.warning("%s: as reward.w_ndcg is %g, their episodes have no reward", summary, w_ndcg)


def in_both(key: str, train: Sequence[Question], held_out: Sequence[Question]) -> str:
    """Return a note on held-out questions that are also training questions, or share documents.

    "" if there are none.
    key: config key of the held-out set (`data.eval`).
    """
    train_texts = {_normalized_text(question) for question in train}
    train_documents = {document for question in train for document in documents(question)}
    duplicates = [question for question in held_out if _normalized_text(question) in train_texts]
    same_documents = [question for question in held_out if documents(question) & train_documents]
    notes, total = [], f"of {len(held_out)} questions"
    if duplicates:
        notes.append(
            f"{len(duplicates)} {total} stand in data.train, too (first {duplicates[0].id})"
        )
    if same_documents:
        first = min(documents(same_documents[0]) & train_documents)
        notes.append(
            f"{len(same_documents)} {total} are on documents of data.train (first {first!r})"
        )
    return f"{key}: {'; '.join(notes)}: their figures say less of new documents" if notes else ""


def documents(question: Question) -> set[str]:
    """Return the names of the documents of a question's gold pages."""
    return {page.rpartition("_")[0] for page in question.gold}


def _normalized_text(question: Question) -> str:
    return " ".join(question.question.split())


def _named_pages(question: Question) -> Iterable[str]:
    return dict.fromkeys(
        [*question.gold, *(name for names in question.alternatives.values() for name in names)]
    )


def _question(row: Any, position: str, data: SearchData) -> Question:
    cells = {field: _field_value(row, field, data) for field in COLUMNS}
    column, value = cells["question"]
    question = (clean_cell(_single(value), position, column) or "").strip()
    answers = reference_answers(cells["reference_answer"], cells["reference_answers"], position)
    for field, is_missing in (("question", not question), ("reference_answer", not answers)):
        if is_missing:
            columns_text = ", ".join(map(str, row))
            raise UserError(
                f"{position}: no {field} (the row has {columns_text}). "
                "Name its column in data.columns."
            )
    column, value = cells["file_name"]
    file_name = (clean_cell(value, position, column) or "").strip()
    pages = page_numbers(cells["reference_page"][1], position, cells["reference_page"][0])
    if pages and not file_name:
        raise UserError(
            f"{position}: {cells['reference_page'][0]}: required: a file_name for these pages"
        )
    gold = _page_ids(*cells["gold_pages"], position)
    if gold and pages:
        raise UserError(
            f"{position}: {cells['gold_pages'][0]} and {cells['reference_page'][0]} both name gold "
            "pages. Leave one of them out"
        )
    gold = gold or gold_pages(file_name, pages)
    return Question(
        id=id_cell(cells["id"][1], position, cells["id"][0]) or "",
        question=question,
        reference_answer=answers[0],
        other_answers=answers[1:],
        file_name=file_name,
        reference_pages=pages,
        gold=gold,
        alternatives=_alternatives(cells["alternatives"][1], gold, position),
        question_type=(
            clean_cell(cells["question_type"][1], position, cells["question_type"][0]) or ""
        ).strip(),
        max_turns=_number(*cells["max_turns"], position, is_integer=True, minimum=1),
        temperature=_number(*cells["temperature"], position, is_integer=False, minimum=0),
        n_agent=_number(*cells["n_agent"], position, is_integer=True, minimum=1),
    )


def question_from_row(row: Mapping[str, Any], data: SearchData | None = None) -> Question:
    """Return the question in a row that another trainer read from a file of questions.

    data: names the columns, as for `load_questions`. Raises UserError, which names the column.
    """
    question = _question(row, "the row", data or SearchData())
    return _with_ids("the row", [question])[0]


def reference_answers(
    first: tuple[str, Any], further: tuple[str, Any], position: str
) -> tuple[str, ...]:
    """Return the right answers in two cells (column, value), without duplicates.

    first: a text or a number.
    further: a list of right answers, also as JSON text: each is a text, a number, or a list of
    parts that all belong to the answer.
    Raises UserError.
    """
    column, value = first
    value = _single(value)
    if isinstance(value, list) and value:
        raise UserError(
            f"{position}: {column}: a list of {len(value)}. Put several right answers into "
            "reference_answers; an answer of several parts is a list in that list"
        )
    answers = [_answer_text(value, position, column)]
    column, value = further
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            raise UserError(f"{position}: {column}: not JSON: {value!r:.40}") from None
    if value is not None and not isinstance(value, list | tuple):
        value = [value]
    for entry in value or ():
        answers.append(_answer_text(entry, position, column))
        if not answers[-1]:
            raise UserError(f"{position}: {column}: an answer in it is empty")
    return tuple(dict.fromkeys(answer for answer in answers if answer))


def _answer_text(value: Any, position: str, column: str) -> str:
    """Return an answer as text; "" if it is empty. A list becomes a JSON array of texts."""
    if isinstance(value, list | tuple):
        parts = [_answer_text(part, position, column) for part in value]
        if "" in parts:
            raise UserError(f"{position}: {column}: a part of the answer is empty")
        return json.dumps(parts, ensure_ascii=False) if parts else ""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value)) if float(value).is_integer() else str(value)
    if isinstance(value, float) and math.isnan(value):  # a missing value in a data frame
        return ""
    return (clean_cell(value, position, column) or "").strip()


def _page_ids(column: str, value: Any, position: str) -> tuple[str, ...]:
    """Return the page ids in a cell: a list of them, also as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            raise UserError(f"{position}: {column}: not JSON: {value!r:.40}") from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UserError(f"{position}: {column}: expected a list of page ids")
    for item in value:
        text_cell(item, position, column)
    return tuple(dict.fromkeys(normalized("NFC", item) for item in value))


def _field_value(row: Mapping[str, Any], field: str, data: SearchData) -> tuple[str, Any]:
    """Return the column that holds a field and its value; of several the first with a value."""
    columns = (data.columns[field],) if field in data.columns else COLUMNS[field]
    for column in columns:
        value = cell(row, column)
        if value is not None:
            return column, value
    return columns[0], None


def _single(value: Any) -> Any:
    """Return the only item of a list of one: some files have a list of right answers."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def page_numbers(value: Any, position: str, column: str) -> tuple[int, ...]:
    """Return the page numbers in a cell: 3, [3, 5], "3", "3, 5", "[3, 5]"; none if it is empty."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = [part for part in value.strip(" []()").split(",") if part.strip()]
    numbers = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        number = _number(column, entry, position, is_integer=True, minimum=1)
        if number is not None:
            numbers.append(int(number))
    return tuple(dict.fromkeys(numbers))


def _number(column: str, value: Any, position: str, *, is_integer: bool, minimum: int) -> Any:
    """Return the number in a cell, also from text; None if it is empty. Raises UserError."""
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return None
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not minimum <= number < 2**31 or (is_integer and not number.is_integer()):
        kind = "a whole number" if is_integer else "a number"
        raise UserError(f"{position}: {column}: expected {kind} >= {minimum}, not {value!r:.40}")
    return int(number) if is_integer else number


def _alternatives(value: Any, gold: Sequence[str], position: str) -> dict[str, tuple[str, ...]]:
    """Return the pages with the same fact by gold page.

    value: an object of gold page -> page ids, also as JSON text; or a list for the only gold page.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            raise UserError(f"{position}: alternatives: not JSON: {value!r:.40}") from None
    if not value:
        return {}
    if isinstance(value, list) and len(gold) == 1:
        value = {gold[0]: value}
    if not isinstance(value, Mapping):
        raise UserError(f"{position}: alternatives: expected an object of gold page -> page ids")
    alternatives: dict[str, tuple[str, ...]] = {}
    for page, page_ids in value.items():
        name = normalized("NFC", page)
        if name not in gold:
            gold_names = ", ".join(gold) or "none"
            raise UserError(
                f"{position}: alternatives: {name!r:.60} is not a gold page ({gold_names})"
            )
        if page_ids is None:  # a Parquet file has every key in every row
            continue
        if not isinstance(page_ids, list | tuple) or not all(
            isinstance(item, str) for item in page_ids
        ):
            raise UserError(
                f"{position}: alternatives: expected a list of page ids for {name!r:.60}"
            )
        for item in page_ids:
            text_cell(item, position, "alternatives")
        composed = dict.fromkeys(normalized("NFC", page_id) for page_id in page_ids)
        alternatives[name] = tuple(page_id for page_id in composed if page_id not in gold)
    return {name: page_ids for name, page_ids in alternatives.items() if page_ids}


def _with_ids(source: str, questions: Sequence[Question]) -> list[Question]:
    def content(question: Question) -> str:
        parts: list[Any] = [question.question, question.reference_answer, question.file_name]
        parts.append(question.gold)
        if question.other_answers:
            parts.append(question.other_answers)
        return json.dumps(parts)

    ids = row_ids(source, questions, content)
    return [
        question.model_copy(update={"id": id}) for question, id in zip(questions, ids, strict=True)
    ]


def question_row(question: Question, **changed: Any) -> dict[str, Any]:
    """Return a question as a row of training data."""
    are_numbered = question.gold == gold_pages(question.file_name, question.reference_pages)
    row = {
        "id": question.id,
        "question": question.question,
        "reference_answer": question.reference_answer,
        "reference_answers": list(question.reference_answers) if question.other_answers else [],
        "file_name": question.file_name,
        "reference_page": list(question.reference_pages),
        "gold_pages": [] if are_numbered else list(question.gold),
        "alternatives": {page: list(pages) for page, pages in question.alternatives.items()},
        "question_type": question.question_type,
        "max_turns": question.max_turns,
        "temperature": question.temperature,
        "n_agent": question.n_agent,
        **changed,
    }
    return {name: value for name, value in row.items() if value not in (None, "", [], {})}
