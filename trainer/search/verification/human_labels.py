"""Read people's decisions from a worksheet, and measure their agreement with the verifier."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from scorekit.errors import UserError
from scorekit.report.render import visible
from scorekit.rows.read import MOST_CHARACTERS
from trainer.search.curation.config_sections import CLASSES, TruthClass

#: Columns of a worksheet that are read back.
ID, PERSON, NOTE = "id", "person", "note"
#: A cell that begins with one of these is a formula to a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
_SHOWN = 8  # max listed errors
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class HumanLabel:
    """The decision of a person."""

    truth: TruthClass
    note: str = ""


def csv_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """Return a CSV that spreadsheets open correctly.

    It is UTF-8 with a byte order mark, for Korean text. No cell is a formula or has several lines.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(head)
    writer.writerows([[_harmless(cell) for cell in row] for row in rows])
    return text.getvalue().encode("utf-8-sig", "replace")


def _harmless(cell: str) -> str:
    text = visible(cell)
    return f"'{text}" if cell.startswith((*_FORMULA, "'")) else text


def read_people(path: Path, ids: Collection[str]) -> tuple[dict[str, HumanLabel], str]:
    """Return people's decisions by row id, and the SHA-256 of the file.

    ids: of the data's rows. A spreadsheet may have saved the file with another separator, or in the
    encoding of Korean Windows. Raises UserError with a line for each invalid row.
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
            f"--decisions {path}: no column {missing[0]!r}, or several. Use worksheet.csv and "
            f"write your classes into its column {PERSON!r}."
        )
    id_by_cell = {_harmless(row_id): row_id for row_id in ids}
    labels: dict[str, HumanLabel] = {}
    errors = []
    for number, row in enumerate(rows, 2):
        cells = dict(zip(head, row, strict=False))
        truth = "_".join(cells.get(PERSON, "").upper().replace("_", " ").split())
        if not truth:
            continue
        row_id = id_by_cell.get(cells.get(ID, ""))
        row_error = _row_error(row_id, cells.get(ID, ""), truth, labels)
        if row_error:
            errors.append(f"row {number}: {visible(row_error)}")
        elif row_id is not None:
            labels[row_id] = HumanLabel(cast(TruthClass, truth), cells.get(NOTE, "").strip())
    if errors:
        listed = errors[:_SHOWN]
        listed += [f"and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
        raise UserError(f"--decisions {path}: {len(errors)} rows cannot be used:", listed)
    return labels, hashlib.sha256(data).hexdigest()


def _row_error(
    row_id: str | None, written: str, truth: str, labels: Mapping[str, HumanLabel]
) -> str:
    if truth not in CLASSES:
        return f"{truth[:40]!r} is not a class: {', '.join(CLASSES)}"
    if row_id is None:
        return f"no row of the data has the id {written[:80]!r}: did a spreadsheet change it?"
    if row_id in labels:
        return f"the id {row_id[:80]!r} is a duplicate"
    return ""


def _rows(data: bytes, path: Path) -> Iterator[list[str]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text = data.decode("cp949")
        except UnicodeDecodeError:
            raise UserError(
                f"--decisions {path}: neither UTF-8 nor Korean Windows. Save it as CSV UTF-8."
            ) from None
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    csv.field_size_limit(MOST_CHARACTERS)
    try:
        yield from csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    except csv.Error as error:
        raise UserError(f"--decisions {path}: not a CSV: {error}") from None


def kappa(pairs: Sequence[tuple[T, T]]) -> float | None:
    """Return Cohen's kappa of two raters (Cohen 1960): (p_o - p_e) / (1 - p_e).

    p_o: the share of agreements; p_e: the expected share by chance. None without pairs, and if both
    raters use only the same single class (p_e is 1).
    """
    if not pairs:
        return None
    count = len(pairs)
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / count
    chance = sum(first[name] * second[name] for name in first) / count**2
    return None if chance == 1 else (observed - chance) / (1 - chance)


def agreement_lines(pairs: Sequence[tuple[T, T]], label: str) -> str:
    """Return the agreement as a line of text."""
    same = sum(a == b for a, b in pairs)
    measured = kappa(pairs)
    share = f"{100 * same / len(pairs):.1f} %" if pairs else "–"
    kappa_text = "not defined" if measured is None else f"{measured:.3f}"
    return f"{label}: {same} of {len(pairs)} ({share}), Cohen's kappa {kappa_text}"
