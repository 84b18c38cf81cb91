"""Salvage the step files of a store: keep every line that can be read, and name the lost ones.

A line is a gzip member with its own checksum, so damage costs the lines that it touches. Files of
earlier versions are one member: of these, the lines before the damage are kept, and no checksum
says whether one of them was changed.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.search.trajectories.store import FOLDER, TrajectoryStore, packed

#: First bytes of a member: gzip, deflate, no flags, no time.
_MEMBER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
_CHUNK = 256
_ID = re.compile(rb'"trajectory_id":\s*"([^"\\]{1,200})"')


@dataclass(frozen=True, slots=True)
class SalvagedStep:
    """A damaged step file.

    damaged: where it is kept.
    num_kept: lines in the new file; if 0, there is no new file.
    losses: a text for each lost line.
    has_unchecked: whether a line without its own checksum was kept.
    """

    path: Path
    damaged: Path
    num_kept: int
    losses: Sequence[str]
    has_unchecked: bool

    def lines(self) -> list[str]:
        """Return lines for people."""
        lines = [f"{self.path}: kept {self.num_kept} lines, lost {len(self.losses)}"]
        lines += [f"  {text}" for text in self.losses]
        if self.has_unchecked:
            lines.append("  it has one checksum for all lines: a kept one may be changed, too")
        if not self.num_kept:
            lines.append("  the step is gone: --resume repeats it, and all later ones")
        return [*lines, f"  the damaged file is {self.damaged}"]


class _StepLine(NamedTuple):
    """A line of a step file.

    error: why it is damaged.
    is_checked: its own checksum is right.
    """

    line: bytes
    error: str | None
    is_checked: bool = True


def salvage(run_dir: Path) -> list[SalvagedStep]:
    """Replace each damaged step file of a run by one with its readable lines.

    The damaged files are kept beside them, as `step-000001.jsonl.gz.damaged`.
    run_dir: of a run, or its folder of trajectories.
    Raises UserError if there is no store.
    """
    is_store = (run_dir / "store.json").is_file()
    store = TrajectoryStore(run_dir if is_store else run_dir / FOLDER)
    steps = (_salvage(store, step) for step in store.steps())
    return [step for step in steps if step is not None]


def _salvage(store: TrajectoryStore, step: int) -> SalvagedStep | None:
    path = store.step_path(step)
    if _is_readable(store, step):
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    readable_lines, losses, ids, has_unchecked = [], [], set(), False
    for number, step_line in enumerate(_step_lines(content), 1):
        problem = step_line.error or store.line_error(step_line.line, step)
        match = _ID.search(step_line.line)
        if problem is None and match and match[1] in ids:
            problem = "its trajectory is in the file already"
        if problem is None:
            readable_lines.append(step_line.line)
            ids.add(match[1] if match else b"")
            has_unchecked |= not step_line.is_checked
        else:
            name = f" ({match[1].decode('utf-8', 'replace')})" if match else ""
            losses.append(f"line {number}{name}: {problem}")
    damaged = _free_name(path)
    os.link(path, damaged)  # a file of the step's name exists at every moment
    if readable_lines:
        write_atomic(path, b"".join(map(packed, readable_lines)))
    else:
        path.unlink()
    return SalvagedStep(path, damaged, len(readable_lines), losses, has_unchecked)


def _is_readable(store: TrajectoryStore, step: int) -> bool:
    try:
        return all(True for _ in store.read([step]))
    except UserError:
        return False


def _free_name(path: Path) -> Path:
    names = (f"{path.name}.damaged{number or ''}" for number in range(1000))
    return next(new for name in names if not (new := path.with_name(name)).exists())


def _step_lines(content: bytes) -> Iterator[_StepLine]:
    """Yield the lines of a step file in order."""
    if not content:
        yield _StepLine(b"", "the file is empty")
    start = 0
    while start < len(content):
        end = content.find(_MEMBER, start + 1)
        end = len(content) if end < 0 else end
        yield from _lines_of(content[start:end])
        start = end


def _lines_of(member: bytes) -> Iterator[_StepLine]:
    """Yield the lines of a member, and of what follows it up to the next one."""
    text, error, remainder = _unpack(member)
    *lines, tail = text.split(b"\n")
    if error is None:
        yield from (_StepLine(line + b"\n", None) for line in lines)
        if tail:
            yield _StepLine(tail, "the line has no end")
        if remainder.strip(b"\0"):
            yield _StepLine(b"", "not a line, or its beginning is damaged")
        return
    if len(lines) <= 1:  # its own checksum, or its end, is wrong
        yield _StepLine(text, error)
        return
    yield from (_StepLine(line + b"\n", None, is_checked=False) for line in lines)
    if tail or error != _CHECKSUM:
        yield _StepLine(tail, f"{error}, and so is all behind it")


_CHECKSUM = "the checksum is wrong"


def _unpack(member: bytes) -> tuple[bytes, str | None, bytes]:
    """Return (text, error, what follows): the text up to the damage, if there is any."""
    unpacker = zlib.decompressobj(31)
    parts: list[bytes] = []
    for start in range(0, len(member), _CHUNK):
        before = unpacker.copy()
        try:
            parts.append(unpacker.decompress(member[start : start + _CHUNK]))
        except zlib.error as error:
            is_checksum = "incorrect data check" in str(error) or "length check" in str(error)
            parts += _up_to_damage(before, member[start : start + _CHUNK])
            return b"".join(parts), _CHECKSUM if is_checksum else "damaged", b""
        if unpacker.eof:
            return b"".join(parts), None, unpacker.unused_data + member[start + _CHUNK :]
    return b"".join(parts), "cut off", b""


def _up_to_damage(unpacker: Any, chunk: bytes) -> Iterator[bytes]:
    """Yield the text of a chunk, byte by byte, up to the first wrong one."""
    with suppress(zlib.error):
        for position in range(len(chunk)):
            yield unpacker.decompress(chunk[position : position + 1])
