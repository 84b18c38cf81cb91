"""The table of trainers in docs/how-to/add-a-reward.md names a test for each of its cells."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "docs/how-to/add-a-reward.md"
LINK = re.compile(r'\[([^\]]+)\]\(([^ )]+) "([^"]+)"\)')


def table_rows() -> list[list[str]]:
    """Return the cells of each row, without the head."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| trainer | scalar |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[0])
def test_each_cell_has_its_test_or_says_that_it_is_not_possible(row):
    assert len(row) == 7
    for cell in row[1:]:
        link = LINK.fullmatch(cell)
        if link is None:
            assert cell.startswith("no: "), cell
            continue
        path = (DOCUMENT.parent / link[2]).resolve()
        names = {
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert link[3] in names, cell
