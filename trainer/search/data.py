"""Questions: rows of a file, folder or hub dataset -> Question, and their gold pages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from scorekit.errors import UserError
from scorekit.text.markup import normalised
from trainer.runs.readers import cell, clean_cell, id_cell, read_rows, row_ids, shortened
from trainer.search.config import SearchConfig
from trainer.search.config_data import COLUMNS, SearchData
from trainer.search.records import Question

log = logging.getLogger(__name__)
#: Pages that are asked about at once.
_AT_ONCE = 8


def load_questions(
    source: str, data: SearchData, *, split: str | None = None, limit: int | None = None
) -> list[Question]:
    """Read questions.

    source: a file, a folder (trainer/runs/readers.py says in which forms), or a hub id. split:
    names a part of a folder or hub dataset. limit: read this many rows at most.

    A missing id becomes a hash of the row. Raises UserError with a line for each wrong row: which,
    what is wrong, what to do.
    """
    questions: list[Question] = []
    faults: list[str] = []
    for where, row in islice(read_rows(source, split), limit):
        try:
            questions.append(_question(row, where, data))
        except UserError as fault:
            faults.append(str(fault))
    if faults:
        what = f"{len(faults)} of {len(faults) + len(questions)} rows cannot be used"
        raise UserError(f"{source}: {what}:", shortened(faults))
    if not questions:
        raise UserError(f"{source}: no rows")
    return _with_ids(source, questions)


def load_train(cfg: SearchConfig) -> list[Question]:
    """The questions to learn from. Raises UserError."""
    data = cfg.data
    if data.train is None:
        raise UserError("data.train is not set: give the questions")
    return load_questions(data.train, data, split=data.train_split, limit=data.train_limit)


def load_held_out(cfg: SearchConfig) -> dict[str, list[Question]]:
    """Those of each evaluation set, by name. Raises UserError."""
    return {name: load_set(cfg, name) for name in cfg.data.held_out}


def load_set(cfg: SearchConfig, name: str) -> list[Question]:
    """Those of one. Raises UserError."""
    of = cfg.data.held_out[name]
    return load_questions(of.path, cfg.data, split=of.split, limit=cfg.eval.eval_limit)


def gold_pages(file_name: str, pages: Sequence[int]) -> tuple[str, ...]:
    """Page ids: the name of the file without its folders and without `.pdf`, `_`, the page; the
    first page of a file is 1. Composed (NFC), as those of an index are."""
    name = normalised("NFC", PurePosixPath(file_name.replace("\\", "/")).name)
    stem = name[:-4] if name.lower().endswith(".pdf") else name
    return tuple(dict.fromkeys(f"{stem}_{page}" for page in pages))


def hold_against_index(
    questions: Sequence[Question], has_page: Callable[[str], bool], data: SearchData
) -> list[Question]:
    """The questions whose gold pages, and alternatives to them, are all in the index.

    has_page: asked once about each page, several at a time. Raises UserError with a line for each
    other question, unless they are to be left out, which is logged.
    """
    wanted = {name: None for question in questions for name in _named_pages(question)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(wanted, pool.map(has_page, wanted), strict=True))
    faults, kept = [], []
    for question in questions:
        missing = [name for name in _named_pages(question) if not found[name]]
        if missing:
            faults.append(f"{question.id}: the index has no page {missing[0]!r}")
        else:
            kept.append(question)
    if not faults:
        return kept
    what = f"{len(faults)} of {len(questions)} questions name a page that is not in the index"
    if data.missing_gold == "refuse":
        told = "ingest its file, mend the row, or set data.missing_gold to leave_out"
        raise UserError(f"{what}: {told}:", shortened(faults))
    if not kept:
        raise UserError(f"{what}: none is left", shortened(faults))
    log.warning("%s: they are left out: %s", what, "; ".join(shortened(faults)))
    return kept


def check_gold(questions: Sequence[Question], w_ndcg: float) -> None:
    """Say before anything is asked that NDCG cannot be had of questions without a gold page, and so
    no reward where it has a weight. Raises UserError where that is so of all."""
    without = sum(not question.gold for question in questions)
    if not (without and w_ndcg):
        return
    what = f"{without} of {len(questions)} questions name no gold page (file_name, reference_page)"
    if without == len(questions):
        raise UserError(
            f"{what}, and NDCG has the weight {w_ndcg:g}: name their columns in data.columns, or "
            "set reward.w_ndcg to 0 (preset focused)"
        )
    log.warning("%s: as reward.w_ndcg is %g, their episodes have no reward", what, w_ndcg)


def in_both(key: str, train: Sequence[Question], held_out: Sequence[Question]) -> str:
    """A line on the held-out questions that are learned from, too, or whose gold pages are of
    documents that are. "" where there are none. key: where they come from (`data.eval`)."""
    asked = {_asked(question) for question in train}
    read = {document for question in train for document in documents(question)}
    both = [question for question in held_out if _asked(question) in asked]
    near = [question for question in held_out if documents(question) & read]
    told, of = [], f"of {len(held_out)} questions"
    if both:
        told.append(f"{len(both)} {of} stand in data.train, too (first {both[0].id})")
    if near:
        first = min(documents(near[0]) & read)
        told.append(f"{len(near)} {of} are on documents of data.train (first {first!r})")
    return f"{key}: {'; '.join(told)}: their figures say less of new documents" if told else ""


def documents(question: Question) -> set[str]:
    """Of its gold pages, by the names that their ids begin with."""
    return {page.rpartition("_")[0] for page in question.gold}


def _asked(question: Question) -> str:
    return " ".join(question.question.split())


def _named_pages(question: Question) -> Iterable[str]:
    return dict.fromkeys(
        [*question.gold, *(name for names in question.alternatives.values() for name in names)]
    )


def _question(row: Any, where: str, data: SearchData) -> Question:
    if not isinstance(row, Mapping):
        kind = "an array" if isinstance(row, list) else type(row).__name__
        raise UserError(f"{where}: a row is an object of fields, not {kind}")
    found = {field: _found(row, field, data) for field in COLUMNS}
    texts = {}
    for field in ("question", "reference_answer"):
        column, value = found[field]
        text = (clean_cell(_single(value), where, column) or "").strip()
        if not text:
            there = ", ".join(map(str, row))
            raise UserError(
                f"{where}: no {field} (the row has {there}): name its column in data.columns"
            )
        texts[field] = text
    column, value = found["file_name"]
    file_name = (clean_cell(value, where, column) or "").strip()
    pages = _pages(found["reference_page"][1], where, found["reference_page"][0])
    if pages and not file_name:
        raise UserError(f"{where}: {found['reference_page'][0]}: no file_name beside it")
    gold = gold_pages(file_name, pages)
    return Question(
        id=id_cell(found["id"][1], where, found["id"][0]) or "",
        **texts,
        file_name=file_name,
        reference_pages=pages,
        gold=gold,
        alternatives=_alternatives(found["alternatives"][1], gold, where),
        question_type=(
            clean_cell(found["question_type"][1], where, found["question_type"][0]) or ""
        ).strip(),
        max_turns=_number(*found["max_turns"], where, whole=True, least=1),
        temperature=_number(*found["temperature"], where, whole=False, least=0),
        n_agent=_number(*found["n_agent"], where, whole=True, least=1),
    )


def _found(row: Mapping[str, Any], field: str, data: SearchData) -> tuple[str, Any]:
    """The column that holds a field, and what stands there; of several the first that is set."""
    columns = (data.columns[field],) if field in data.columns else COLUMNS[field]
    for column in columns:
        value = cell(row, column)
        if value is not None:
            return column, value
    return columns[0], None


def _single(value: Any) -> Any:
    """A list of one text is that text: some files hold all answers that count as right."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _pages(value: Any, where: str, column: str) -> tuple[int, ...]:
    """Page numbers in a cell: 3, [3, 5], "3", "3, 5", "[3, 5]"; none where nothing stands there."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = [part for part in value.strip(" []()").split(",") if part.strip()]
    numbers = []
    for one in value if isinstance(value, list | tuple) else [value]:
        number = _number(column, one, where, whole=True, least=1)
        if number is not None:
            numbers.append(int(number))
    return tuple(dict.fromkeys(numbers))


def _number(column: str, value: Any, where: str, *, whole: bool, least: int) -> Any:
    """A number in a cell, also as text; None where nothing stands there. Raises UserError."""
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return None
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not least <= number < 2**31 or (whole and not number.is_integer()):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{where}: {column}: {kind} from {least} is wanted, not {value!r:.40}")
    return int(number) if whole else number


def _alternatives(value: Any, gold: Sequence[str], where: str) -> dict[str, tuple[str, ...]]:
    """Gold page -> pages that carry the same fact: an object of page ids, also as JSON text; a list
    alone is of the only gold page."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{where}: alternatives: not JSON: {value!r:.40}") from None
    if not value:
        return {}
    if isinstance(value, list) and len(gold) == 1:
        value = {gold[0]: value}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: alternatives: an object of gold page -> page ids is wanted")
    found: dict[str, tuple[str, ...]] = {}
    for given, others in value.items():
        name = normalised("NFC", given)
        if name not in gold:
            known = ", ".join(gold) or "none"
            raise UserError(f"{where}: alternatives: {name!r:.60} is no gold page ({known})")
        if others is None:  # a Parquet file has every key in every row
            continue
        if not isinstance(others, list | tuple) or not all(isinstance(o, str) for o in others):
            raise UserError(f"{where}: alternatives: a list of page ids is wanted for {name!r:.60}")
        composed = dict.fromkeys(normalised("NFC", other) for other in others)
        found[name] = tuple(other for other in composed if other not in gold)
    return {name: others for name, others in found.items() if others}


def _with_ids(source: str, questions: Sequence[Question]) -> list[Question]:
    def content(of: Question) -> str:
        return json.dumps([of.question, of.reference_answer, of.file_name, of.gold])

    ids = row_ids(source, questions, content)
    return [one.model_copy(update={"id": id}) for one, id in zip(questions, ids, strict=True)]
