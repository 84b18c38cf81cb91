"""What the exports share: a new folder that is whole or not there, and a turn as a tool's call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from trainer.search.records import Turn

#: What is said of a run without episodes.
NOTHING = "no episodes to export"
_FUNCTIONS = {"search": "search", "crop": "crop", "complete": "search_complete"}


class CalledTool(NamedTuple):
    """An action as other tools have it. id: alone in its episode."""

    id: str
    function: str
    arguments: dict[str, Any]


def called_tool(turn: Turn) -> CalledTool | None:
    """The tool that a turn called; None: it was no action."""
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
    """A folder to fill, which has its name when the block ends well, and goes where it does not.
    Raises UserError where something stands there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: is not empty; name a new folder")
    with replacing_folder(target) as folder:
        yield folder
