"""What benches of training share: arms trained in processes, results, and the page of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bench.common import ROOT
from demo.processes import run_module
from scorekit.errors import UserError

PAGE = ROOT / "docs/evidence.md"
PICTURES = ROOT / "docs/evidence"


def check_arms(only: Sequence[str], known: Collection[str]) -> None:
    """Raise UserError where an arm that is asked for is none."""
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise UserError(f"--only: no arm {unknown[0]!r}; known: {', '.join(known)}")


def run_logged(
    module: str, config: Path, settings: Sequence[str], log: Path, environment: Mapping[str, str]
) -> float:
    """`python -m MODULE train` in a process of its own; returns its seconds. settings: KEY=VALUE;
    environment: beside ours. Raises UserError with the end of the log where it fails."""
    command = [module, "train", "--config", str(config)]
    for setting in settings:
        command += ["--set", setting]
    started = time.monotonic()
    if code := run_module(*command, log=log, env=environment):
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"the trainer ended with exit code {code}; the end of {log}:\n{tail}")
    return time.monotonic() - started


def write_between(begin: str, end: str, body: str, page: Path = PAGE) -> None:
    """Put text between two marks of a document; the prose around them stays."""
    text = page.read_text(encoding="utf-8")
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise UserError(f"{page}: the marks {begin!r} and {end!r} are missing")
    page.write_text(f"{head}{begin}\n\n{body}\n\n{end}{tail}", encoding="utf-8")


def cell(value: float | None, digits: int) -> str:
    """A number in a cell; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
