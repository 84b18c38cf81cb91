"""Rows for training: ids, and which of them are labeled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.rows.samples import BadRows
from trainer.runs.readers import object_of, read_rows, report_bad_rows


@dataclass(frozen=True, slots=True)
class SftRow:
    """A row for training.

    location: its file and line.
    ids, mask: [L]; mask is 1 if a token is trained on.
    images: paths, in the order of their ids.
    """

    location: str
    ids: list[int]
    mask: list[int]
    images: tuple[str, ...] = ()

    @property
    def labels(self) -> list[int]:
        """Return [L]: the ids that are trained on, -100 elsewhere."""
        return [
            i if is_trained else -100 for i, is_trained in zip(self.ids, self.mask, strict=True)
        ]


def has_ids(row: Any) -> bool:
    """Return whether a row is given as ids."""
    return isinstance(row, Mapping) and row.get("input_ids") is not None


def rows_of(source: str, split: str | None, limit: int | None) -> list[tuple[str, Any]]:
    """Return (location, row), with a UserError in place of a row that is none, as `read_rows`.

    Raises UserError without rows, or if only some are ids."""
    rows = list(islice(read_rows(source, split, with_bad=True), limit))
    if not rows:
        raise UserError(f"{source}: no rows")
    usable = [(location, row) for location, row in rows if isinstance(row, Mapping)]
    kinds = {has_ids(row) for _, row in usable}
    if len(kinds) > 1:
        first = next(location for location, row in usable if has_ids(row) != has_ids(usable[0][1]))
        raise UserError(f"{first}: some rows have `input_ids` and others not. Use two files")
    return rows


def rows_of_ids(
    source: str,
    rows: Sequence[tuple[str, Any]],
    highest: int,
    image_folder: Path,
    bad_rows: BadRows = "refuse",
) -> list[SftRow]:
    """Return rows of `input_ids` and `action_mask`, optionally with `images` and `leave_out`.

    `leave_out` lists the turns, counted from 0, whose actions are not trained on.
    highest: the highest id that the model has.
    Raises UserError with a line for each wrong row, unless bad_rows is "skip".
    """
    results, errors = [], []
    for location, row in rows:
        try:
            values = object_of(row, location)
            results.append(_row_of_ids(values, location, highest, image_folder))
        except UserError as error:
            errors.append(str(error))
    report_bad_rows(source, errors, len(rows), bad_rows)
    return results


def _row_of_ids(row: Any, location: str, highest: int, image_folder: Path) -> SftRow:
    ids = _whole_numbers(row["input_ids"], location, "input_ids", highest)
    if row.get("action_mask") is None:
        raise UserError(
            f"{location}: `input_ids` without an `action_mask` (1 for tokens to train on)"
        )
    mask = _whole_numbers(row["action_mask"], location, "action_mask", 1)
    if len(mask) != len(ids):
        raise UserError(f"{location}: {len(ids)} input_ids, but an action_mask of {len(mask)}")
    turns = actions(mask)
    excluded = row.get("leave_out") or []
    if excluded:
        excluded = _whole_numbers(excluded, location, "leave_out", len(turns) - 1)
    for number in excluded:
        begin, end = turns[number]
        mask[begin:end] = [0] * (end - begin)
    if 1 not in mask:
        raise UserError(f"{location}: no token to train on (action_mask, leave_out)")
    return SftRow(location, ids, mask, tuple(_images(row.get("images"), location, image_folder)))


def actions(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of ones, as (begin, end)."""
    runs, begin = [], 0
    for is_action, run in groupby(mask):
        end = begin + len(list(run))
        if is_action:
            runs.append((begin, end))
        begin = end
    return runs


def cut_to(row: SftRow, length: int, *, through_turns: bool) -> SftRow | None:
    """Return a row of at most `length` tokens with something to train on.

    It is cut at that length, or after the last turn that ends before it. None if there is no such
    turn, or if the row has images, whose features would no longer fit.
    """
    ends = [end for _, end in actions(row.mask) if end <= length]
    end = length if through_turns else max(ends, default=0)
    if row.images or 1 not in row.mask[:end]:
        return None
    return replace(row, ids=row.ids[:end], mask=row.mask[:end])


def _whole_numbers(value: Any, location: str, column: str, highest: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{location}: {column}: expected a list of whole numbers")
    for number in value:
        if type(number) is not int or not 0 <= number <= highest:
            raise UserError(
                f"{location}: {column}: {number!r:.20} is no whole number from 0 to {highest}"
            )
    return list(value)


def _images(value: Any, location: str, folder: Path) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{location}: images: expected a list of paths")
    for name in value:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{location}: images: {path}: no such file (data.image_folder)")
        yield str(path)
