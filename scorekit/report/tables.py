"""Tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDE = 10_000


def at_full_width(table: Table) -> Table:
    """Return the table with the width of its cells: a narrow terminal cuts no number.

    It is to be printed with `crop=False`."""
    table.width = Console(width=_WIDE).measure(table).maximum
    return table
