"""Check that each attribute of the queue documents its owner where it is defined."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

QUEUE = Path(__file__).parents[4] / "scorekit/server/queue"
#: One or several threads, a lock, or the reason why none is needed; then further remarks.
OWNER = re.compile(r"owner: (loop|tokenizer|model|lock|fixed|any)\b", re.I)


def _definitions(cls: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the first statement that assigns each field or attribute, by name."""
    statement_by_name: dict[str, ast.stmt] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            statement_by_name.setdefault(node.target.id, node)
    for node in ast.walk(cls):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in (part for assigned in targets for part in ast.walk(assigned)):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                statement_by_name.setdefault(target.attr, node)
    return statement_by_name


@pytest.mark.parametrize("path", sorted(QUEUE.glob("*.py")), ids=lambda path: path.name)
def test_each_attribute_of_the_queue_names_its_owner(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    silent = []
    for cls in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        if OWNER.search(ast.get_docstring(cls) or ""):
            continue
        for name, node in _definitions(cls).items():
            if not any(OWNER.search(line) for line in lines[node.lineno - 1 : node.end_lineno]):
                silent.append(f"{cls.name}.{name}")
    assert silent == []


def test_the_ageing_of_bulk_work_stands_once():
    file_names = [
        path.name for path in QUEUE.glob("*.py") if "bulk_had_last" in path.read_text("utf-8")
    ]
    assert file_names == ["priority.py"]
