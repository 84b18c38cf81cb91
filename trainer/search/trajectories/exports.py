"""The folder of an export: a new one, which appears only when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scorekit.errors import UserError
from scorekit.files import replacing_folder

#: The message for a run without episodes.
NOTHING = "no episodes to export"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Open a temporary folder that gets its name if the block succeeds, and is removed otherwise.

    Raises UserError if the target is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: not empty. Name a new folder.")
    with replacing_folder(target) as folder:
        yield folder
