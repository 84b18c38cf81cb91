"""Rows as they are learned: ids, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from trainer.runs.readers import read_rows, shortened


@dataclass(frozen=True, slots=True)
class SftRow:
    """where: its file and line. ids, mask, [L]: mask is 1 where a token is learned. images: paths,
    in the order in which the ids hold their features."""

    where: str
    ids: list[int]
    mask: list[int]
    images: tuple[str, ...] = ()

    @property
    def labels(self) -> list[int]:
        """[L]: the ids that are learned, -100 elsewhere."""
        return [i if learned else -100 for i, learned in zip(self.ids, self.mask, strict=True)]


def has_ids(row: Any) -> bool:
    """Whether a row is given as ids."""
    return isinstance(row, Mapping) and row.get("input_ids") is not None


def rows_of(source: str, split: str | None, limit: int | None) -> list[tuple[str, Any]]:
    """(where it stands, row). Raises UserError if there is none, or where some are ids and
    others are not."""
    found: list[tuple[str, Any]] = []
    for where, row in read_rows(source, split):
        if len(found) == limit:
            break
        found.append((where, row))
    if not found:
        raise UserError(f"{source}: no rows")
    kinds = {has_ids(row) for _, row in found}
    if len(kinds) > 1:
        first = next(where for where, row in found if has_ids(row) != has_ids(found[0][1]))
        raise UserError(f"{first}: some rows have `input_ids` and others not: give two files")
    return found


def rows_of_ids(rows: Sequence[tuple[str, Any]], highest: int, image_folder: Path) -> list[SftRow]:
    """Rows of `input_ids` and `action_mask`, also with `images` and `leave_out`: the turns, counted
    from 0, whose actions are not learned. highest: the highest id that the model knows. Raises
    UserError with a line for each wrong row."""
    found, faults = [], []
    for where, row in rows:
        try:
            found.append(_row_of_ids(row, where, highest, image_folder))
        except UserError as fault:
            faults.append(str(fault))
    if faults:
        what = f"{len(faults)} of {len(rows)} rows cannot be used:"
        raise UserError(what, shortened(faults))
    return found


def _row_of_ids(row: Any, where: str, highest: int, image_folder: Path) -> SftRow:
    ids = _whole_numbers(row["input_ids"], where, "input_ids", highest)
    if row.get("action_mask") is None:
        raise UserError(
            f"{where}: `input_ids` without an `action_mask`: 1 where a token is learned"
        )
    mask = _whole_numbers(row["action_mask"], where, "action_mask", 1)
    if len(mask) != len(ids):
        raise UserError(f"{where}: {len(ids)} input_ids, but an action_mask of {len(mask)}")
    turns = actions(mask)
    out = row.get("leave_out") or []
    for number in _whole_numbers(out, where, "leave_out", len(turns) - 1) if out else []:
        begin, end = turns[number]
        mask[begin:end] = [0] * (end - begin)
    if 1 not in mask:
        raise UserError(f"{where}: no token is learned (action_mask, leave_out)")
    return SftRow(where, ids, mask, tuple(_images(row.get("images"), where, image_folder)))


def actions(mask: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ones, as (begin, end)."""
    found, place = [], 0
    for learned, run in groupby(mask):
        end = place + len(list(run))
        if learned:
            found.append((place, end))
        place = end
    return found


def cut_to(row: SftRow, length: int, *, through_turns: bool) -> SftRow | None:
    """A row of at most so many tokens that still has something to learn: cut there, or behind the
    last turn that ends before it; None where there is no such turn, and of a row with images, whose
    features would no longer fit."""
    ends = [end for _, end in actions(row.mask) if end <= length]
    end = length if through_turns else max(ends, default=0)
    if row.images or 1 not in row.mask[:end]:
        return None
    return replace(row, ids=row.ids[:end], mask=row.mask[:end])


def _whole_numbers(value: Any, where: str, column: str, highest: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {column}: a list of whole numbers is wanted")
    for one in value:
        if type(one) is not int or not 0 <= one <= highest:
            raise UserError(
                f"{where}: {column}: {one!r:.20} is no whole number from 0 to {highest}"
            )
    return list(value)


def _images(value: Any, where: str, folder: Path) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: images: a list of paths is wanted")
    for one in value:
        path = folder / one
        if not path.is_file():
            raise UserError(f"{where}: images: {path}: no such file (data.image_folder)")
        yield str(path)
