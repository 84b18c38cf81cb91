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


def errors_of_row(row: Mapping[str, Any]) -> tuple[str, str, Marked | None]:
    """(source, translation, error) of a row; no error where the rater found none."""
    src, _ = unmarked(row["source"])
    mt, places = unmarked(row["target"])
    severity = row["severity"].strip().upper()
    if "NO-ERROR" in (severity, row["category"].strip().upper()):
        return src, mt, None
    return src, mt, Marked(severity, places)
