"""The page of error classes, of error types on the wire, and of exit codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import REQUEST_ERRORS, SAMPLE_ERROR_TYPES, TEXT_ERROR_TYPES, SampleError
from tools.docs.commands import all_commands
from tools.docs.entries import anchor, escape, paragraphs

ROOT = Path(__file__).parents[2]
PACKAGES = ("scorekit", "services", "trainer", "synth")


class ErrorClass(NamedTuple):
    """A class of errors, as its source says it.

    exit_code: empty if it is its base's.
    """

    name: str
    module: str
    base: str
    document: str
    exit_code: str


def subclasses_of(name: str, packages: tuple[str, ...] = PACKAGES) -> Iterator[ast.ClassDef]:
    """Yield the classes that derive from a class, found in the source: nothing is imported."""
    classes = [node for _, node in _classes(packages)]
    bases = {name}
    while True:
        new = [c for c in classes if c.name not in bases and bases & set(base_names(c))]
        if not new:
            return
        bases |= {c.name for c in new}
        yield from new


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without their modules."""
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


@cache
def _classes(packages: tuple[str, ...]) -> list[tuple[str, ast.ClassDef]]:
    """Return the classes of some packages, each with its module."""
    pairs = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "\nclass " in text:
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
                pairs += [(module.removesuffix(".__init__"), node) for node in classes]
    return pairs


def error_classes() -> list[ErrorClass]:
    """Return ScorekitError and every class that derives from it, each below its base."""
    names = {node.name for node in subclasses_of("ScorekitError")} | {"ScorekitError"}
    entries = [
        ErrorClass(node.name, module, base, ast.get_docstring(node) or "", _exit_code(node))
        for module, node in _classes(PACKAGES)
        if node.name in names
        for base in [next((b for b in base_names(node) if b in names), "")]
    ]
    return list(_in_order(entries, ""))


def _in_order(classes: list[ErrorClass], base: str) -> Iterator[ErrorClass]:
    for error in classes:
        if error.base == base:
            yield error
            yield from _in_order(classes, error.name)


def _exit_code(node: ast.ClassDef) -> str:
    """Return what the class assigns to exit_code, as it is written."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            target = ast.unparse(part.targets[0]).removeprefix("self.")
            if target == "exit_code":
                return ast.unparse(part.value)
    return ""


def errors_page() -> str:
    """Return the page."""
    parts = [
        "# Errors and exit codes\n",
        "A command that fails prints one line and ends with an exit code. A service answers a "
        "request that fails with a type; a sample that fails has a type of its own.\n",
        "## Exit codes\n",
        *_exit_codes(),
        "\n## Types of a refused request { #request-errors }\n",
        "| type | HTTP status | may succeed later |\n| --- | --- | --- |",
        *(
            f"| `{name}` | {status} | {'yes' if retryable else 'no'} |"
            for name, (status, retryable) in REQUEST_ERRORS.items()
        ),
        "\n## Types of a failed sample { #sample-errors }\n",
        "| type | caused by | may succeed later |\n| --- | --- | --- |",
        *(
            f"| `{name}` | {'the text' if name in TEXT_ERROR_TYPES else 'the service'} "
            f"| {'yes' if SampleError(name, '').retryable else 'no'} |"
            for name in SAMPLE_ERROR_TYPES
        ),
        "\n## Error classes { #classes }\n",
        *map(_class_entry, error_classes()),
    ]
    return "\n".join(parts)


def _exit_codes() -> list[str]:
    rows = [
        "| exit code | meaning |\n| --- | --- |",
        "| 0 | The command did what it was asked. |",
        "| 1 | An error that the user cannot mend, or what the command says below. |",
        "| 2 | A mistake of the user, a file or a folder that cannot be used, or a package that "
        "is not installed. The line says what to do. |",
        "| 3 | Work is left, because a service failed: what the command says below. |",
        "| 130, 143 | Ctrl-C or SIGTERM. |",
        "| 141 | stdout is the result, and its reader has ended (`head`). |",
        "\nWhat single commands add:\n",
    ]
    for command in all_commands():
        text = " ".join(command.help.split())
        match = re.search(r"(?:(?<=\. )|^)[^.]*[Ee]xit code.*", text)
        if match:
            rows.append(f"- `{command.name}`: {escape(match[0])}")
    return rows


def _class_entry(error: ErrorClass) -> str:
    facts = [f"`{error.module}`"]
    facts += [f"a [{error.base}](#{anchor(error.base)})"] if error.base else []
    facts += [f"exit code: `{error.exit_code}`"] if error.exit_code else []
    return (
        f"### {error.name} {{ #{anchor(error.name)} .key }}\n\n{' · '.join(facts)}\n"
        f"{{ .key-facts }}\n\n{paragraphs(error.document)}\n"
    )
