"""Rows of WMT's MQM files, in which `<v>` and `</v>` surround an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_MARK = re.compile(r"</?v>")


class Marked(NamedTuple):
    """An error. severity: in capitals. ranges: (start, end) in the translation."""

    severity: str
    ranges: list[tuple[int, int]]


def unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without its marks, and the (start, end) of the marked ranges.

    Raises ValueError for an unpaired mark.
    """
    ranges: list[tuple[int, int]] = []
    parts: list[str] = []
    length = end = 0
    opened: int | None = None
    for mark in _MARK.finditer(text):
        parts.append(text[end : mark.start()])
        length += mark.start() - end
        end = mark.end()
        if (mark.group() == "<v>") != (opened is None):
            raise ValueError("an unpaired <v> or </v>")
        if opened is None:
            opened = length
        else:
            if length > opened:
                ranges.append((opened, length))
            opened = None
    if opened is not None:
        raise ValueError("a <v> without its </v>")
    return "".join((*parts, text[end:])), ranges


def unquoted(cell: str) -> str:
    """Return a cell without the quotes of a CSV, which only some of the files have (newstest2020).

    In those, a quoted cell has its inner quotes doubled. A text that is itself in quotes has single
    inner quotes, or none, and stays as it is."""
    inner = cell[1:-1]
    is_csv = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner
    if is_csv and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell


def errors_of_row(row: Mapping[str, Any]) -> tuple[str, str, Marked | None]:
    """Return (source, translation, error) of a row; the error is None if the rater marked none."""
    src, _ = unmarked(unquoted(row["source"]))
    mt, ranges = unmarked(unquoted(row["target"]))
    severity = row["severity"].strip().upper()
    # Names depend on the annotators' tools: `No-error`, `no_error`.
    if "NO-ERROR" in (_dashed(severity), _dashed(row["category"].strip().upper())):
        return src, mt, None
    return src, mt, Marked(severity, ranges)


def _dashed(name: str) -> str:
    return name.replace("_", "-").replace(" ", "-")
