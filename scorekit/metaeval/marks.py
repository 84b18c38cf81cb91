"""The rows of WMT's MQM files: `<v>` and `</v>` stand around what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_MARK = re.compile(r"</?v>")


class Marked(NamedTuple):
    """An error. severity: in capitals. places: (start, end) in the translation."""

    severity: str
    places: list[tuple[int, int]]


def unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the (start, end) that they stood around.

    Raises ValueError for a mark without its other.
    """
    places: list[tuple[int, int]] = []
    parts: list[str] = []
    length = last = 0
    opened: int | None = None
    for mark in _MARK.finditer(text):
        parts.append(text[last : mark.start()])
        length += mark.start() - last
        last = mark.end()
        if (mark.group() == "<v>") != (opened is None):
            raise ValueError("a <v> or </v> without its other")
        if opened is None:
            opened = length
        else:
            if length > opened:
                places.append((opened, length))
            opened = None
    if opened is not None:
        raise ValueError("a <v> without its </v>")
    return "".join((*parts, text[last:])), places


def unquoted(cell: str) -> str:
    """A cell without the quotes of a CSV, which some of the files have (newstest2020) and others
    have not: around the cell, with those in it doubled. A text that is itself in quotes has single
    ones in it, or none, and stays."""
    inner = cell[1:-1]
    is_csv = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner
    if is_csv and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell


def errors_of_row(row: Mapping[str, Any]) -> tuple[str, str, Marked | None]:
    """(source, translation, error) of a row; no error where the rater found none."""
    src, _ = unmarked(unquoted(row["source"]))
    mt, places = unmarked(unquoted(row["target"]))
    severity = row["severity"].strip().upper()
    # names come from the annotators' tools: `No-error`, `no_error`
    if "NO-ERROR" in (_dashed(severity), _dashed(row["category"].strip().upper())):
        return src, mt, None
    return src, mt, Marked(severity, places)


def _dashed(name: str) -> str:
    return name.replace("_", "-").replace(" ", "-")
