"""What people decide on a worksheet, read back, and how far they and the verifier agree."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scorekit.errors import UserError
from scorekit.report.render import visible
from scorekit.rowfile import MOST_CHARACTERS
from trainer.search.curation.verification.classes import CLASSES, TruthClass

#: Columns of a worksheet that are read back.
ID, PERSON, NOTE = "id", "person", "note"
#: A cell that begins with one of these is a formula to a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
_SHOWN = 8  # faulty rows
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A person's."""

    truth: TruthClass
    note: str = ""


def csv_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """A CSV that spreadsheets open as it is meant: UTF-8 with its mark, so that Korean is Korean;
    no cell is a formula, or goes over several lines."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(head)
    writer.writerows([[_harmless(cell) for cell in row] for row in rows])
    return text.getvalue().encode("utf-8-sig", "replace")


def _harmless(cell: str) -> str:
    shown = visible(cell)
    return f"'{shown}" if cell.startswith((*_FORMULA, "'")) else shown


def read_people(path: Path, ids: Collection[str]) -> tuple[dict[str, Judgement], str]:
    """Row id -> what a person says, of the rows where one does, and the file's SHA-256.

    ids: of the data's rows. The file may come back from a spreadsheet: with another separator, in
    the encoding of Korean Windows. Raises UserError with a line for each row that cannot be used.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--decisions {path}: {error.strerror or error}") from None
    rows = _rows(data, path)
    head = [cell.strip().lower() for cell in next(rows, [])]
    missing = [name for name in (ID, PERSON) if head.count(name) != 1]
    if missing:
        raise UserError(
            f"--decisions {path}: has no column {missing[0]!r}, or several: take worksheet.csv and "
            f"write your classes into its column {PERSON!r}"
        )
    known = {_as_written(one): one for one in ids}
    found: dict[str, Judgement] = {}
    faults = []
    for number, row in enumerate(rows, 2):
        cells = dict(zip(head, row, strict=False))
        truth = "_".join(cells.get(PERSON, "").upper().replace("_", " ").split())
        if not truth:
            continue
        row_id = known.get(cells.get(ID, ""))
        fault = _fault(row_id, cells.get(ID, ""), truth, found)
        if fault:
            faults.append(f"row {number}: {visible(fault)}")
        elif row_id is not None:
            found[row_id] = Judgement(_class(truth), cells.get(NOTE, "").strip())
    if faults:
        told = faults[:_SHOWN]
        told += [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise UserError(f"--decisions {path}: {len(faults)} rows cannot be used:", told)
    return found, hashlib.sha256(data).hexdigest()


def _class(word: str) -> TruthClass:
    return next(name for name in CLASSES if name == word)


def _fault(row_id: str | None, written: str, truth: str, found: Mapping[str, Judgement]) -> str:
    if truth not in CLASSES:
        return f"{truth[:40]!r} is no class: {', '.join(CLASSES)}"
    if row_id is None:
        return f"no row of the data has the id {written[:80]!r}: has a spreadsheet changed it?"
    if row_id in found:
        return f"the id {row_id[:80]!r} stands a second time"
    return ""


def _as_written(row_id: str) -> str:
    return _harmless(row_id)


def _rows(data: bytes, path: Path) -> Iterator[list[str]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text = data.decode("cp949")
        except UnicodeDecodeError:
            raise UserError(
                f"--decisions {path}: is neither UTF-8 nor of Korean Windows: save it as CSV UTF-8"
            ) from None
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    csv.field_size_limit(MOST_CHARACTERS)
    try:
        yield from csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    except csv.Error as error:
        raise UserError(f"--decisions {path}: is no CSV: {error}") from None


def kappa(pairs: Sequence[tuple[T, T]]) -> float | None:
    """Cohen's kappa of two raters (Cohen 1960): (p_o - p_e) / (1 - p_e).

    p_o: the share on which they agree; p_e: that on which two raters with their shares would by
    chance. None where there are no pairs, and where both know only one class, and the same: then
    chance agrees on all.
    """
    if not pairs:
        return None
    count = len(pairs)
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / count
    chance = sum(first[name] * second[name] for name in first) / count**2
    return None if chance == 1 else (observed - chance) / (1 - chance)


def agreement_lines(pairs: Sequence[tuple[T, T]], what: str) -> str:
    """In words."""
    same = sum(a == b for a, b in pairs)
    measured = kappa(pairs)
    share = f"{100 * same / len(pairs):.1f} %" if pairs else "–"
    of = "not defined" if measured is None else f"{measured:.3f}"
    return f"{what}: {same} of {len(pairs)} ({share}), Cohen's kappa {of}"
