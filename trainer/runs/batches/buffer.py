"""Keep on disk what was generated for the next updates, so that a killed run does not lose it.

    RUN/buffer/update-000007-0.jsonl    one object for each finished episode or sample group of the
                                        batch of update 7, of process 0

Only a run with `rl.max_staleness` above 0 has it. The files of an update are removed when a
checkpoint holds that update: a run that is resumed from an earlier one needs them again.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from scorekit.files import with_path_in_error
from trainer.runs.run_log import append_jsonl, read_jsonl

FOLDER = "buffer"
_NAME = re.compile(r"update-(\d{6,})-(\d{1,6})\.jsonl")


class RolloutBuffer:
    """The buffer of one process of a run. Threads may share it."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Prepare to read and write.

        run_dir: the folder of the run.
        rank: the index of this process, which writes its own files and reads those of all.
        """
        self.folder, self._rank = run_dir / FOLDER, rank
        self._opened: set[Path] = set()
        self._lock = threading.Lock()

    def updates(self) -> list[int]:
        """Return the updates that have files, ascending."""
        return sorted({update for update, _ in self._files()})

    def read(self, update: int) -> list[dict[str, Any]]:
        """Return the rows of an update, of all processes, in the order in which each wrote them.

        A last line that is incomplete is left out. Raises UserError for a damaged file.
        """
        paths = [path for number, path in self._files() if number == update]
        return [row for path in paths for row in read_jsonl(path)]

    def append(self, update: int, row: dict[str, Any]) -> None:
        """Add a row, which survives if this process dies."""
        path = self.folder / f"update-{update:06d}-{self._rank}.jsonl"
        with self._lock:
            if path not in self._opened:
                self.folder.mkdir(parents=True, exist_ok=True)
                _cut_incomplete_line(path)
                self._opened.add(path)
            append_jsonl(path, row)

    def cut(self, done: int) -> None:
        """Remove the files of the updates up to `done`, which a checkpoint holds.

        One process of the run calls it.
        """
        for update, path in self._files():
            if update <= done:
                path.unlink()

    def _files(self) -> list[tuple[int, Path]]:
        """Return (update, file) of all files of the buffer, by their names."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), path) for match, path in matches if match]


def _cut_incomplete_line(path: Path) -> None:
    """Remove what a killed process left of its last line, so that the next one starts a line."""
    if not path.exists():
        return
    with with_path_in_error(path), path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        os.fsync(file.fileno())
