"""What `python -m trainer check` found: one row for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from scorekit.errors import ScorekitError, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and whether a run could start with it."""

    name: str
    found: str
    ok: bool


@dataclass(slots=True)
class Findings:
    """All checks, in order. memory: (what, bytes), of which the last two are all and free."""

    checks: list[Check] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """Those that a run would end with."""
        return [check for check in self.checks if not check.ok]

    def look(self, name: str, work: Callable[..., tuple[T, str]], *arguments: Any) -> T | None:
        """Do `work`, which gives what is needed further on and what was found; note that, or why it
        cannot be."""
        try:
            value, found = work(*arguments)
        except (ScorekitError, OSError) as error:
            lines = error.lines if isinstance(error, UserError) else ()
            said = " ".join([str(error), "; ".join(lines)])
            self.checks.append(Check(name, " ".join(said.split()), False))
            return None
        self.checks.append(Check(name, found, True))
        return value


def say_findings(findings: Findings) -> int:
    """Show them all, and what fails as errors; the exit code."""
    console = Console()
    console.print(check_table(findings))
    if findings.memory:
        console.print(memory_table(findings))
    for fault in findings.failed:
        found = fault.found.removeprefix(f"{fault.name}: ")  # an error names its key itself
        typer.echo(f"error: {fault.name}: {found}", err=True)
    return 2 if findings.failed else 0


def check_table(findings: Findings) -> Table:
    """What `python -m trainer check` found."""
    table = Table("", "check", Column("found", overflow="fold"))
    for check in findings.checks:
        mark = Text("ok", "green") if check.ok else Text("failed", "red")
        table.add_row(mark, check.name, Text(check.found))
    return table


def memory_table(findings: Findings) -> Table:
    """Where the memory goes."""
    table = Table("memory (estimate)", Column("GiB", justify="right"))
    for what, size in findings.memory:
        table.add_row(what, f"{size / 2**30:.2f}")
    return table
