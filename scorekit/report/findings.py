"""Results of the checks before a run: one row per check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from scorekit.command import print_line
from scorekit.errors import ScorekitError, UserError
from scorekit.net.masking import without_passwords
from scorekit.report.render import visible

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """A check before a run: its name, its result in words, and whether a run could start."""

    name: str
    result: str
    ok: bool


@dataclass(slots=True)
class Findings:
    """All checks, in order.

    memory: (use, bytes); the last two are the total and the free.
    """

    checks: list[Check] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """Return the checks that would end a run."""
        return [check for check in self.checks if not check.ok]

    @property
    def errors(self) -> list[str]:
        """Return a line for each failed check, which begins with its name."""
        return [f"{check.name}: {_without_key(check)}" for check in self.failed]

    def run_check(self, name: str, work: Callable[..., tuple[T, str]], *arguments: Any) -> T | None:
        """Run `work`, which returns a value and a description, and note the result as a check.

        Returns the value, or None if it raised an error, which is noted as the check's failure."""
        try:
            value, description = work(*arguments)
        except (ScorekitError, OSError) as error:
            lines = error.lines if isinstance(error, UserError) else ()
            text = " ".join([str(error), "; ".join(lines)])
            self.checks.append(Check(name, " ".join(text.split()), False))
            return None
        self.checks.append(Check(name, without_passwords(description), True))
        return value


def _without_key(check: Check) -> str:
    """Return a check's result without its config key, which an error repeats."""
    key = check.name.rpartition(": ")[2]
    return check.result.removeprefix(f"{key}: ")


def print_check_results(findings: Findings) -> int:
    """Print all checks, and the failed ones as errors. Return the exit code."""
    console = Console()
    checks = Table("", "check", Column("found", overflow="fold"))
    for check in findings.checks:
        mark = Text("ok", "green") if check.ok else Text("failed", "red")
        checks.add_row(mark, check.name, Text(visible(check.result)))
    console.print(checks)
    if findings.memory:
        memory = Table("memory (estimate)", Column("GiB", justify="right"))
        for use, size in findings.memory:
            memory.add_row(use, f"{size / 2**30:.2f}")
        console.print(memory)
    for error_line in findings.errors:
        print_line(f"error: {error_line}")
    return 2 if findings.failed else 0
