"""A pandas data frame -> samples; results -> columns beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from scorekit.schemas import Failed, Result, Scored

if TYPE_CHECKING:
    from pandas import DataFrame


def samples_of_frame(frame: DataFrame, task: str | None = None) -> list[dict[str, Any]]:
    """A sample for each row. task: of a judge that scores translations; its rows name their
    languages. Raises UserError that names the column, or the row, that is wrong."""
    needed = ("src", "mt") if task is None else ("src", "mt", "src_lang", "tgt_lang")
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        have = ", ".join(map(str, frame.columns))
        raise UserError(f"the data frame has no column {missing[0]!r}; it has: {have}")
    names = [name for name in (*needed, "ref") if name in frame.columns]
    samples = []
    for row, cells in zip(frame.index, zip(*(frame[n] for n in names), strict=True), strict=True):
        sample = dict(zip(names, cells, strict=True))
        if _is_blank(sample.get("ref")):
            sample.pop("ref", None)
        for name, text in sample.items():
            if not isinstance(text, str):
                raise UserError(f"row {row!r}, column {name!r}: {_kind(text)} is no text")
        samples.append(sample if task is None else sample | {"task": task})
    return samples


def with_results(frame: DataFrame, results: Sequence[Result]) -> DataFrame:
    """A copy of the frame with a column for each thing that the results say."""
    from pandas import Series

    def column(values: list[Any], kind: str) -> Series:
        return Series(values, index=frame.index, dtype=kind)

    good = [isinstance(result, Scored) for result in results]
    new = frame.copy()
    new["score"] = column(
        [r.score if isinstance(r, Scored) else math.nan for r in results], "float"
    )
    new["ok"] = column(good, "bool")
    new["error"] = column([_error(result) for result in results], "object")
    for name in ("error_spans", "omissions", "unplaced", "windows"):
        told = [getattr(r, name) if isinstance(r, Scored) else None for r in results]
        if any(found is not None for found in told):
            plain = [s if s is None else [one.model_dump() for one in s] for s in told]
            new[name] = column(plain, "object")
    return new


def _is_blank(cell: Any) -> bool:
    """pandas has several ways to leave a cell blank."""
    from pandas import NA

    return cell is None or cell is NA or (isinstance(cell, float) and math.isnan(cell))


def _kind(cell: Any) -> str:
    return "None" if cell is None else f"{cell!r:.40} ({type(cell).__name__})"


def _error(result: Result) -> str | None:
    if isinstance(result, Failed):
        return f"{result.error.type}: {result.error.message}"
    return None
