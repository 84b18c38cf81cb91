"""Patterns that stand in files: alternatives in rows, which may refer to named parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PART = re.compile(r"\{([A-Z_]+)\}")
Rows = str | list[str]


def pattern_of(rows: Rows, parts: Mapping[str, str]) -> str:
    """Return the pattern of alternatives, in which `{NAME}` stands for the part of this name."""
    joined = rows if isinstance(rows, str) else "|".join(rows)
    return _PART.sub(lambda match: parts[match.group(1)], joined)


def add_parts(parts: dict[str, str], rows_by_name: Mapping[str, Rows]) -> None:
    """Add named parts, each of which may refer to those before it."""
    for name, rows in rows_by_name.items():
        parts[name] = pattern_of(rows, parts)


def compile_patterns(
    rows_by_name: Mapping[str, Rows], parts: Mapping[str, str]
) -> dict[str, re.Pattern[str]]:
    """Return the patterns by name. Case is ignored."""
    return {
        name: re.compile(pattern_of(rows, parts), re.IGNORECASE)
        for name, rows in rows_by_name.items()
    }
