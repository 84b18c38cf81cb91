"""Count names that say nothing, and docstrings that begin with no sentence.

python -m tools.language            a table by package
python -m tools.language --list trainer/search      every finding below a path
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scorekit.command import run_command

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "scorekit",
    "services",
    "trainer",
    "synth",
    "synth_parallel",
    "deploy",
    "demo",
    "bench",
    "evidence",
    "testing",
    "tools",
    "tests",
)
NAMES_PAGE = ROOT / "docs/reference/names.md"
#: First words of docstrings that are fragments.
FRAGMENTS = frozenset(
    {
        "Of",
        "What",
        "Whether",
        "Where",
        "As",
        "Those",
        "That",
        "How",
        "Which",
        "For",
        "In",
        "From",
        "By",
        "With",
        "Behind",
    }
)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Finding:
    """A banned name or a fragment: its file relative to the root, its line, and the word."""

    path: Path
    line: int
    word: str
    is_docstring: bool


@cache
def banned_names() -> frozenset[str]:
    """Return the identifiers in the last table of docs/reference/names.md."""
    table = NAMES_PAGE.read_text(encoding="utf-8").partition("| banned | use instead |")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    return frozenset(name.strip() for cell in cells for name in cell.split(","))


def python_files(below: Path) -> list[Path]:
    """Return the Python files of our packages below a path, sorted."""
    roots = [ROOT / package for package in PACKAGES]
    files = {file for root in roots for file in root.rglob("*.py")}
    return sorted(file for file in files if file == below or below in file.parents)


def find_all(file: Path) -> Iterator[Finding]:
    """Yield every banned name that a file binds, and every docstring that is a fragment."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    path, banned = file.relative_to(ROOT), banned_names()
    for node in ast.walk(tree):
        for name, line in _bound_names(node):
            if name in banned:
                yield Finding(path, line, name, False)
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text and text.split()[0].strip("`,.:") in FRAGMENTS:
                yield Finding(path, node.body[0].lineno, text.split("\n")[0], True)


def docstring_count(file: Path) -> int:
    """Return how many docstrings a file has."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return sum(isinstance(n, _DOCUMENTED) and bool(ast.get_docstring(n)) for n in nodes)


def _bound_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of the variables, parameters, attributes and functions a node binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name.lstrip("_"), node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg.lstrip("_"), node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id.lstrip("_"), node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr.lstrip("_"), node.lineno
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
        yield node.name, node.lineno


def main() -> int:
    """Print the table or the list."""
    parser = argparse.ArgumentParser(description="Count names and docstrings that say nothing.")
    parser.add_argument("--list", action="store_true", help="print every finding")
    parser.add_argument("path", nargs="?", type=Path, default=Path("."), help="in the checkout")
    options = parser.parse_args()
    names: Counter[str] = Counter()
    fragments: Counter[str] = Counter()
    docstrings: Counter[str] = Counter()
    for file in python_files(options.path.resolve()):
        package = file.relative_to(ROOT).parts[0]
        docstrings[package] += docstring_count(file)
        for finding in find_all(file):
            (fragments if finding.is_docstring else names)[package] += 1
            if options.list:
                print(f"{finding.path}:{finding.line}: {finding.word}")
    print(f"{'package':16}{'banned names':>14}{'fragments':>12}{'docstrings':>12}")
    for package in docstrings:
        print(f"{package:16}{names[package]:14}{fragments[package]:12}{docstrings[package]:12}")
    print(f"{'all':16}{names.total():14}{fragments.total():12}{docstrings.total():12}")
    return 0


if __name__ == "__main__":
    run_command(main)
