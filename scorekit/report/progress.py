"""A progress bar with count, rate and remaining time, on stderr or in the notebook's cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: Makes a bar of (total, done), and yields a function that advances it.
Bar = Callable[[int, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def progress_bar(total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show the bar and yield a function that advances it."""
    with _display() as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda more: progress.advance(task, more)


@contextmanager
def progress_bars() -> Iterator[Callable[[str], Bar]]:
    """Show several bars in one place; yield a function that returns the bar of a name."""
    from rich.progress import TextColumn

    with _display(TextColumn("{task.description}", markup=False)) as progress:

        @contextmanager
        def bar(name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
            task = progress.add_task(name, total=total, completed=done)
            yield lambda more: progress.advance(task, more)

        yield lambda name: lambda total, done: bar(name, total, done)


def _display(*first_columns: Any) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s")

    columns = (
        *first_columns,
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
