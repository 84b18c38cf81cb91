"""Terminal output of a run: a progress bar with the remaining time, and a line for each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Column title -> (key of the log line, format).
Columns = Mapping[str, tuple[str, str]]


class Console:
    """A context manager around a run of `num_updates` updates, `done` of them done before."""

    def __init__(
        self,
        columns: Columns,
        narrow_titles: Sequence[str],
        num_updates: int,
        done: int = 0,
        *,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        """Prepare the progress bar and the columns.

        columns: of the line of an update.
        narrow_titles: the columns to print if the terminal is too narrow for all.
        quiet: print nothing, for a process that is not the main one.
        verbose: print every stat, on several lines if the terminal is too narrow for one.
        """
        self._columns = columns
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=rich_console.Console(stderr=True, quiet=quiet),
            redirect_stdout=False,
        )
        self._task: TaskID = self._progress.add_task(
            "training", total=num_updates, completed=done, rate=""
        )
        self._lines = _layout(columns, narrow_titles, self._progress.console.width, verbose)
        self._headed = False

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, line: dict[str, Any]) -> None:
        """Print the log line of a finished update."""
        if not self._headed:
            for titles in self._lines:
                self.print_line(" ".join(_cell(title, self._columns[title][1]) for title in titles))
            self._headed = True
        for titles in self._lines:
            cells = (self._columns[title] for title in titles)
            self.print_line(" ".join(_cell(line.get(key), form) for key, form in cells))
        seconds = sum(
            line.get(key, 0.0) for key in ("rollout_s", "logprob_s", "reward_s", "update_s")
        )
        rate = f"{seconds:.1f} s/update, {line['samples'] / max(seconds, 1e-9):.0f} samples/s"
        self._progress.update(self._task, advance=1, rate=rate)

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _layout(
    columns: Columns, narrow_titles: Sequence[str], width: int, verbose: bool
) -> list[list[str]]:
    """Return the titles of the columns, by line.

    All are on one line if they fit; with `verbose` on as many as needed; else only the narrow ones.
    """
    lines: list[list[str]] = [[]]
    remaining = width
    for title, (_, form) in columns.items():
        needed = _width(form) + 1  # the space before it
        if lines[-1] and needed > remaining:
            lines.append([])
            remaining = width
        lines[-1].append(title)
        remaining -= needed
    return lines if verbose or len(lines) == 1 else [list(narrow_titles)]


def _width(form: str) -> int:
    return int(form.split(".")[0].rstrip("d"))


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-".rjust(_width(form))
    return value.rjust(_width(form)) if isinstance(value, str) else format(value, form)
