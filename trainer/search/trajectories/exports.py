"""The shared code of exports: an atomic new folder, and a turn as a tool call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from trainer.search.records import Turn

#: The message for a run without episodes.
NOTHING = "no episodes to export"
_FUNCTIONS = {"search": "search", "crop": "crop", "complete": "search_complete"}


class CalledTool(NamedTuple):
    """An action as a tool call. id: unique in its episode."""

    id: str
    function: str
    arguments: dict[str, Any]


def called_tool(turn: Turn) -> CalledTool | None:
    """Return the tool call of a turn; None for an invalid action."""
    if turn.action not in _FUNCTIONS:
        return None
    arguments: dict[str, Any] = {}
    if turn.action == "search":
        arguments = {"query": turn.query}
    elif turn.action == "crop":
        arguments = {"box": list(turn.box or ()), "convention": turn.convention}
    return CalledTool(f"call-{turn.number}", _FUNCTIONS[turn.action], arguments)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Open a temporary folder that gets its name if the block succeeds, and is removed otherwise.

    Raises UserError if the target is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: not empty. Name a new folder.")
    with replacing_folder(target) as folder:
        yield folder
