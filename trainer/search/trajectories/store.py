"""Store the episodes of a run on disk: a file for each step, and each image once by its hash.

    RUN/trajectories/store.json               name of the run and schema version
    RUN/trajectories/step-000007.jsonl.gz     one trajectory per line (`records.Trajectory`)
    RUN/trajectories/images/ab/abcd....png    images of the policy and the generator

The files are compressed JSON lines: `zcat`, `jq` and pandas read them. The ids of an image are one
repeated id, which compresses well. Each line is compressed by itself, with its own checksum, so
that a damaged byte costs one line (`search salvage`, salvage.py).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from scorekit.config import describe_validation_error
from scorekit.errors import UserError
from scorekit.files import (
    atomic_writer,
    put_unsynced,
    remove_temporaries,
    sync,
    temporary_of,
    with_path_in_error,
)
from trainer.search.records import Trajectory, mask_digest

#: Version of the files; it changes when a key changes its meaning.
SCHEMA_VERSION = 1
FOLDER = "trajectories"
_STEP = re.compile(r"step-(\d{6,})\.jsonl\.gz")
_SHA256 = re.compile("[0-9a-f]{64}")


class _Owner(BaseModel):
    """The content of store.json."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int
    run: str


class _Line(Trajectory):
    """A line of a step file."""

    schema_version: int = SCHEMA_VERSION


class TrajectoryStore:
    """The trajectories of one run. Threads may share it; one process writes.

    folder: `trajectories` in the run directory.
    run: its name, to write; None: to read an existing store.
    Raises UserError if the folder does not exist, belongs to another run, or has another schema
    version.
    """

    def __init__(self, folder: Path, run: str | None = None) -> None:
        self.folder = folder
        if run is not None and not (folder / "store.json").exists():
            _claim(folder, run)
        owner = _read_owner(folder / "store.json")
        if run not in (None, owner.run):
            raise UserError(
                f"{folder}: contains trajectories of the run {owner.run!r}, not of {run!r}. Two "
                "runs cannot share a folder. Choose another misc.run_dir."
            )
        self.run = owner.run
        self._stored_hashes: set[str] = set()
        self._unsynced: list[Path] = []
        self._lock = threading.Lock()
        self._syncing = threading.Lock()

    # -- images ----------------------------------------------------

    def save_image(self, sha256: str, png: bytes) -> None:
        """Store an image under its hash, before a record refers to it.

        It can be read at once, and is on disk when `write_step` returns. A stored one is skipped.
        Raises ValueError if the hash is wrong.
        """
        if sha256 in self._stored_hashes:
            return
        if hashlib.sha256(png).hexdigest() != sha256:
            raise ValueError(f"an image of {len(png)} bytes does not have the hash {sha256}")
        path = self._image_path(sha256)
        # A file may be empty after a power cut, so compare its bytes.
        if not path.exists() or path.read_bytes() != png:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(self.folder / "images" / path.name)  # `cut` looks only here
            with with_path_in_error(path):
                temporary.write_bytes(png)
            put_unsynced(temporary, path)
        with self._lock:
            self._stored_hashes.add(sha256)
            self._unsynced.append(path)

    def read_image(self, sha256: str) -> bytes:
        """Return the PNG of a hash. Raises UserError if it is missing or damaged."""
        path = self._image_path(sha256)
        try:
            png = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        if hashlib.sha256(png).hexdigest() != sha256:
            raise UserError(f"{path}: damaged: its content does not have the hash of its name")
        return png

    def sync_images(self) -> None:
        """Sync all stored images to disk."""
        with self._syncing:  # one thread at a time: another one's images are not forgotten
            with self._lock:
                fresh = list(self._unsynced)
            for path in (*fresh, *sorted({path.parent for path in fresh})):
                sync(path)
            if fresh:
                sync(self.folder / "images")
            with self._lock:  # only now: after a failed sync they are synced again
                del self._unsynced[: len(fresh)]

    def _image_path(self, sha256: str) -> Path:
        # The value may come from a file, so do not use it as a path unchecked.
        if not _SHA256.fullmatch(sha256):
            raise UserError(f"{self.folder}: {sha256[:80]!r} is not the SHA-256 of an image")
        return self.folder / "images" / sha256[:2] / f"{sha256}.png"

    # -- steps ----------------------------------------------------

    def write_step(self, step: int, trajectories: Sequence[Trajectory]) -> Path:
        """Write a step atomically; when it returns, step and images survive a power cut.

        A repeated step replaces the existing one and has a later attempt (`next_attempt`). Raises
        ValueError for trajectories of another run, step or attempt, a duplicate id, an image that
        is not stored, and a record that could not be read back.
        """
        self._check(step, trajectories)
        self.sync_images()
        path = self.step_path(step)
        with atomic_writer(path) as file:
            for trajectory in trajectories:
                line = _Line.model_construct(**dict(trajectory)).model_dump_json()
                _Line.model_validate_json(line)  # fail now, not in the next reader
                file.write(packed(line.encode() + b"\n"))
            if not trajectories:
                file.write(packed(b""))
        return path

    def next_attempt(self, step: int) -> int:
        """Return the attempt of the next write of a step: 0, or one more than the stored one."""
        if not self.step_path(step).exists():
            return 0
        return max((trajectory.attempt for trajectory in self.read([step])), default=0) + 1

    def cut(self, done: int) -> None:
        """Remove the steps after `done`, which a resumed run repeats, and temporary files.

        Only one process may call it, before the others of its run write.
        """
        for folder in (self.folder, self.folder / "images"):
            remove_temporaries(folder)
        for step in self.steps():
            if step > done:
                self.step_path(step).unlink()
        sync(self.folder)

    def steps(self) -> list[int]:
        """Return the numbers of the stored steps, ascending."""
        names = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def read(
        self, steps: Iterable[int] | None = None, *, tokens: bool = True
    ) -> Iterator[Trajectory]:
        """Yield the trajectories of `steps` (default: all), with one in memory at a time.

        tokens: include the ids, which are most of a trajectory; False: `tokens` is None. Raises
        UserError with file and line for damage, another run or schema, or an action mask (if it is
        read) without its digest.
        """
        for step in self.steps() if steps is None else steps:
            yield from self._read_step(self.step_path(step), step, tokens)

    def _read_step(self, path: Path, step: int, tokens: bool) -> Iterator[Trajectory]:
        number = 0
        try:
            if not path.stat().st_size:  # gzip reads an empty file as no lines
                raise EOFError("the file is empty")
            with gzip.open(path, "rb") as file:
                for line in file:
                    number += 1
                    yield self._trajectory(line, step, tokens)
        except _InvalidLine as error:
            raise UserError(f"{path}, line {number}: {error}. {self._hint()}") from None
        except (OSError, EOFError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(f"{path}: cannot be read: {reason or error}. {self._hint()}") from None

    def line_error(self, line: bytes, step: int) -> str | None:
        """Return why a line of a step cannot be read; None if it can."""
        try:
            self._trajectory(line, step, tokens=True)
        except _InvalidLine as error:
            return str(error)
        return None

    def _hint(self) -> str:
        """Return the advice for a step file that cannot be read."""
        return (
            f"Run `scorekit search salvage {self.folder.parent}`, which keeps all lines "
            "that can be read, or restore the file from a copy"
        )

    def _trajectory(self, line: bytes, step: int, tokens: bool) -> Trajectory:
        try:
            row = _Line.model_validate_json(line if tokens else _without_tokens(line))
        except ValidationError as error:
            raise _InvalidLine(describe_validation_error(error, "line")) from None
        if row.schema_version != SCHEMA_VERSION:
            raise _InvalidLine(
                f"schema version {row.schema_version}, but this version reads {SCHEMA_VERSION}"
            )
        if (row.run, row.step) != (self.run, step):
            raise _InvalidLine(f"of step {row.step} of the run {row.run!r}, not of {self.run!r}")
        if mask_problem := _mask_error(row):
            raise _InvalidLine(mask_problem)
        fields = {name: getattr(row, name) for name in Trajectory.model_fields}
        return Trajectory.model_construct(**(fields if tokens else fields | {"tokens": None}))

    def _check(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        attempts, ids = {t.attempt for t in trajectories}, [t.trajectory_id for t in trajectories]
        foreign = [t.trajectory_id for t in trajectories if (t.run, t.step) != (self.run, step)]
        if foreign:
            raise ValueError(f"not of step {step} of the run {self.run!r}: {foreign[:3]}")
        if len(attempts) > 1 or len(ids) != len(set(ids)):
            raise ValueError(f"step {step}: attempts {sorted(attempts)}, or a duplicate id")
        if attempts and min(attempts) < (min_attempt := self.next_attempt(step)):
            raise ValueError(f"step {step} exists: its next attempt is {min_attempt}")
        for trajectory in trajectories:
            if mask_problem := _mask_error(trajectory):
                raise ValueError(f"{trajectory.trajectory_id}: {mask_problem}")
            for sha256 in trajectory.images:
                if sha256 not in self._stored_hashes and not self._image_path(sha256).is_file():
                    raise ValueError(f"{trajectory.trajectory_id}: image {sha256} is not stored")

    def step_path(self, step: int) -> Path:
        """Return the path of a step's file."""
        return self.folder / f"step-{step:06d}.jsonl.gz"


def packed(line: bytes) -> bytes:
    """Return a line as a gzip member of its own: many in a row are a gzip file, too."""
    return gzip.compress(line, 3, mtime=0)


def _without_tokens(line: bytes) -> bytes:
    """Return a line with null instead of its ids, which are removed before parsing.

    Only the key can match, because quotes in texts are escaped; and its value has no inner object.
    A line in another form, from another program, is returned unchanged.
    """
    prefix, key, tail = line.partition(b'"tokens":{')
    ids, end, suffix = tail.partition(b"}")
    if not end or b"{" in ids:
        return line
    return b"".join((prefix, key[:-1], b"null", suffix))


class _InvalidLine(Exception):
    """A line that is no trajectory, or that does not belong in this file."""


def _mask_error(trajectory: Trajectory) -> str | None:
    tokens = trajectory.tokens
    if tokens is None:
        return None
    if len(tokens.action_mask) != len(tokens.completion_ids):
        return f"{len(tokens.completion_ids)} ids, an action mask of {len(tokens.action_mask)}"
    if mask_digest(tokens.action_mask) != tokens.mask_digest:
        return "its action mask does not have the digest that was written with it"
    return None


def _claim(folder: Path, run: str) -> None:
    """Write store.json, unless another process has just written it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "store.json"
    temporary = temporary_of(path)
    temporary.write_text(_Owner(schema_version=SCHEMA_VERSION, run=run).model_dump_json(indent=1))
    try:
        sync(temporary)
        os.link(temporary, path)  # unlike a rename, it fails if the file exists
    except (FileExistsError, FileNotFoundError):  # or another process removed our temporary file
        pass
    finally:
        temporary.unlink(missing_ok=True)
    sync(folder)


def _read_owner(path: Path) -> _Owner:
    try:
        owner = _Owner.model_validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path}: no trajectories of a run: {reason}. Name another run directory."
        ) from None
    except ValidationError as error:
        raise UserError(f"{path}: {describe_validation_error(error, 'file')}") from None
    if owner.schema_version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: its trajectories have schema version {owner.schema_version}, but this "
            f"version reads {SCHEMA_VERSION}. Read them with the version that wrote them."
        )
    return owner
