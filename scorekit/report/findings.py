"""What a check before a run has found: one row for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from scorekit.command import say
from scorekit.errors import ScorekitError, UserError
from scorekit.report.render import visible

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

    @property
    def faults(self) -> list[str]:
        """A line for each of those, which begins with what was looked at."""
        return [f"{check.name}: {_without_key(check)}" for check in self.failed]

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


def _without_key(check: Check) -> str:
    """Return what was found without the key in front of it, which an error names itself."""
    key = check.name.rpartition(": ")[2]
    return check.found.removeprefix(f"{key}: ")


def say_findings(findings: Findings) -> int:
    """Show them all, and what fails as errors; the exit code."""
    console = Console()
    console.print(check_table(findings))
    if findings.memory:
        console.print(memory_table(findings))
    for fault in findings.faults:
        say(f"error: {fault}")
    return 2 if findings.failed else 0


def check_table(findings: Findings) -> Table:
    """All checks, a row each."""
    table = Table("", "check", Column("found", overflow="fold"))
    for check in findings.checks:
        mark = Text("ok", "green") if check.ok else Text("failed", "red")
        table.add_row(mark, check.name, Text(visible(check.found)))
    return table


def memory_table(findings: Findings) -> Table:
    """Where the memory goes."""
    table = Table("memory (estimate)", Column("GiB", justify="right"))
    for what, size in findings.memory:
        table.add_row(what, f"{size / 2**30:.2f}")
    return table
