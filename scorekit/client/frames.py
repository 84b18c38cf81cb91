"""Convert a pandas data frame to samples, and results to columns of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scorekit.client.deduplication import failure
from scorekit.errors import UserError
from scorekit.schemas import Failed, Result, Scored

if TYPE_CHECKING:
    from pandas import DataFrame


#: The columns that results become; the last four only if a result has them.
_RESULT_COLUMNS = ("score", "ok", "error", "error_spans", "omissions", "unplaced", "windows")


def samples_of_frame(
    frame: DataFrame, task: str | None = None, prefix: str = ""
) -> list[dict[str, Any] | Failed]:
    """Return a sample for each row, or the failure of a row without a text.

    task: of a judge that scores translations; its rows name their languages. prefix: of the new
    columns. Raises UserError if a column is missing or exists already, or if no row is a sample.
    """
    needed = ("src", "mt") if task is None else ("src", "mt", "src_lang", "tgt_lang")
    _check_columns(frame, needed, prefix)
    names = [name for name in (*needed, "ref") if name in frame.columns]
    rows: list[dict[str, Any] | Failed] = []
    for cells in zip(*(frame[name] for name in names), strict=True):
        sample = dict(zip(names, cells, strict=True))
        if _is_blank(sample.get("ref")):
            sample.pop("ref", None)
        bad_columns = [name for name, text in sample.items() if not isinstance(text, str)]
        if bad_columns:
            text = f"column {bad_columns[0]!r}: {_kind(sample[bad_columns[0]])} is not text"
            rows.append(failure("invalid_input", text))
        else:
            rows.append(sample if task is None else sample | {"task": task})
    if rows and isinstance(rows[0], Failed) and all(isinstance(row, Failed) for row in rows):
        first = f"row {frame.index[0]!r}, {rows[0].error.message}"
        raise UserError(f"no row of the data frame can be scored: {first}")
    return rows


def _check_columns(frame: DataFrame, needed: Sequence[str], prefix: str) -> None:
    columns = list(frame.columns)
    missing = [name for name in needed if name not in columns]
    if missing:
        column_list = ", ".join(map(str, columns))
        raise UserError(f"the data frame has no column {missing[0]!r}; it has: {column_list}")
    duplicates = [name for name in (*needed, "ref") if columns.count(name) > 1]
    if duplicates:
        raise UserError(f"the data frame has several columns {duplicates[0]!r}: leave one")
    existing = [name for name in (prefix + result for result in _RESULT_COLUMNS) if name in columns]
    if existing:
        raise UserError(
            f"the data frame has a column {existing[0]!r} already. Rename or drop it, or give the "
            'new columns a prefix, such as prefix="xcomet_"'
        )


def with_results(frame: DataFrame, results: Sequence[Result], prefix: str = "") -> DataFrame:
    """Return a copy of the frame with a column for each part of the results."""
    from pandas import Series

    def column(values: list[Any], kind: str) -> Series:
        return Series(values, index=frame.index, dtype=kind)

    scores = [r.score if isinstance(r, Scored) else math.nan for r in results]
    new = frame.copy()
    new[f"{prefix}score"] = column(scores, "float")
    new[f"{prefix}ok"] = column([isinstance(result, Scored) for result in results], "bool")
    new[f"{prefix}error"] = column([_error(result) for result in results], "object")
    for name in _RESULT_COLUMNS[3:]:
        lists = [getattr(r, name) if isinstance(r, Scored) else None for r in results]
        if any(entries is not None for entries in lists):
            records = [
                entries if entries is None else [entry.model_dump() for entry in entries]
                for entries in lists
            ]
            new[prefix + name] = column(records, "object")
    return new


def _is_blank(cell: Any) -> bool:
    """Return True for any of the ways in which pandas leaves a cell blank."""
    from pandas import NA

    return cell is None or cell is NA or (isinstance(cell, float) and math.isnan(cell))


def _kind(cell: Any) -> str:
    return "None" if cell is None else f"{cell!r:.40} ({type(cell).__name__})"


def _error(result: Result) -> str | None:
    if isinstance(result, Failed):
        return f"{result.error.type}: {result.error.message}"
    return None
