"""The episodes of a run on disk: a file a step, and beside them every picture once, by its hash.

    RUN/trajectories/store.json               whose they are, and in which schema
    RUN/trajectories/step-000007.jsonl.gz     a trajectory a line (`records.Trajectory`)
    RUN/trajectories/images/ab/abcd....png    what the policy and the generator were shown

JSON lines, packed: `zcat` and `jq` read them, and so does pandas. The ids of a page's picture are
one id many times over, which packs to next to nothing.
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

from scorekit.config import describe_faults
from scorekit.errors import UserError
from scorekit.files import naming, put_unsynced, remove_temporaries, replacing, sync, temporary_of
from trainer.search.records import Trajectory, mask_digest

#: Of the files: another number is another meaning of a key.
SCHEMA_VERSION = 1
FOLDER = "trajectories"
#: What to do about a step's file that cannot be read.
_MEND = (
    "put it back from a copy, or take it away: `collect --resume` does its step and all behind it "
    "again"
)
_STEP = re.compile(r"step-(\d{6,})\.jsonl\.gz")
_SHA256 = re.compile("[0-9a-f]{64}")


class _Owner(BaseModel):
    """store.json."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int
    run: str


class _Line(Trajectory):
    """A line of a step's file."""

    schema_version: int = SCHEMA_VERSION


class TrajectoryStore:
    """The trajectories of one run. Threads may share it; one process writes.

    folder: `trajectories` in the folder of the run. run: its name, to write; None: to read what is
    there. Raises UserError where the folder is another run's (two never merge), is none, or has a
    schema that is not ours.
    """

    def __init__(self, folder: Path, run: str | None = None) -> None:
        self.folder = folder
        if run is not None and not (folder / "store.json").exists():
            _claim(folder, run)
        owner = _read_owner(folder / "store.json")
        if run not in (None, owner.run):
            raise UserError(
                f"{folder}: holds the trajectories of the run {owner.run!r}, not of {run!r}: two "
                "runs never share a folder; choose another misc.run_dir"
            )
        self.run = owner.run
        self._known: set[str] = set()
        self._unsynced: list[Path] = []
        self._lock = threading.Lock()

    # -- pictures ----------------------------------------------------

    def keep_picture(self, sha256: str, png: bytes) -> None:
        """Store a picture under its hash, before anything refers to it: it can be read at once, and
        is on the disk when `write_step` returns. A known one costs nothing. Raises ValueError where
        the hash is not the picture's."""
        if sha256 in self._known:
            return
        if hashlib.sha256(png).hexdigest() != sha256:
            raise ValueError(f"a picture of {len(png)} bytes does not have the hash {sha256}")
        path = self._picture_path(sha256)
        # What a power cut left under the name may be empty: only the same bytes are the picture.
        if not path.exists() or path.read_bytes() != png:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(self.folder / "images" / path.name)  # where one look finds it
            with naming(path):
                temporary.write_bytes(png)
            put_unsynced(temporary, path)
        with self._lock:
            self._known.add(sha256)
            self._unsynced.append(path)

    def picture(self, sha256: str) -> bytes:
        """The PNG of that hash. Raises UserError where it is not there or is damaged."""
        path = self._picture_path(sha256)
        try:
            png = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        if hashlib.sha256(png).hexdigest() != sha256:
            raise UserError(f"{path}: is damaged: its content does not have the hash of its name")
        return png

    def sync_pictures(self) -> None:
        """Have all that were kept on the disk when it returns."""
        with self._lock:
            fresh = list(self._unsynced)
        for path in (*fresh, *sorted({path.parent for path in fresh})):
            sync(path)
        if fresh:
            sync(self.folder / "images")
        with self._lock:  # not before: a disk that fails now is asked again
            del self._unsynced[: len(fresh)]

    def _picture_path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):  # it may come from a file: never a path
            raise UserError(f"{self.folder}: {sha256[:80]!r} is no SHA-256 of a picture")
        return self.folder / "images" / sha256[:2] / f"{sha256}.png"

    # -- steps ----------------------------------------------------

    def write_step(self, step: int, trajectories: Sequence[Trajectory]) -> Path:
        """Write a whole step; when it returns, step and pictures outlive a power cut. Whoever dies
        meanwhile leaves the step as it was before.

        A step that is done again takes the place of the one that is there, and has a later attempt
        (`next_attempt`). Raises ValueError for trajectories of another run, step or attempt, an id
        that stands twice, a picture that was not kept, and what could not be read back.
        """
        self._check(step, trajectories)
        self.sync_pictures()
        path = self._step_path(step)
        with replacing(path) as file, gzip.GzipFile("", "wb", 3, file, mtime=0) as packed:
            for trajectory in trajectories:
                line = _Line.model_construct(**dict(trajectory)).model_dump_json()
                _Line.model_validate_json(line)  # else the next reader would meet the fault
                packed.write(line.encode() + b"\n")
        return path

    def next_attempt(self, step: int) -> int:
        """Attempt of a step that is about to be done: 0, or one more than of what is there."""
        if not self._step_path(step).exists():
            return 0
        return max((found.attempt for found in self.read([step])), default=0) + 1

    def cut(self, done: int) -> None:
        """Remove the steps behind `done`, which a run that goes on from there does again, and what
        a process was writing that was killed. By one process, before the others of its run write.
        """
        for place in (self.folder, self.folder / "images"):
            remove_temporaries(place)
        for step in self.steps():
            if step > done:
                self._step_path(step).unlink()
        sync(self.folder)

    def steps(self) -> list[int]:
        """Numbers of the steps that are there, ascending."""
        names = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def read(
        self, steps: Iterable[int] | None = None, *, tokens: bool = True
    ) -> Iterator[Trajectory]:
        """The trajectories of `steps` (default: of all), a step after the other, one in memory at a
        time. tokens: with their ids, which are most of a trajectory; False: `tokens` is None.
        Raises UserError that names file and line: damage, another run's, another schema, an action
        mask (where it is read) that is not the one that was written."""
        for step in self.steps() if steps is None else steps:
            yield from self._read_step(self._step_path(step), step, tokens)

    def _read_step(self, path: Path, step: int, tokens: bool) -> Iterator[Trajectory]:
        number = 0
        try:
            if not path.stat().st_size:  # to gzip, an empty file has no lines
                raise EOFError("it is empty")
            with gzip.open(path, "rb") as file:
                for line in file:
                    number += 1
                    yield self._trajectory(line, step, tokens)
        except ValidationError as error:
            fault = describe_faults(error, "line")
            raise UserError(f"{path}, line {number}: {fault}: {_MEND}") from None
        except _Foreign as error:
            raise UserError(f"{path}, line {number}: {error}: {_MEND}") from None
        except (OSError, EOFError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(f"{path}: cannot be read: {reason or error}: {_MEND}") from None

    def _trajectory(self, line: bytes, step: int, tokens: bool) -> Trajectory:
        found = _Line.model_validate_json(line if tokens else _without_tokens(line))
        if found.schema_version != SCHEMA_VERSION:
            raise _Foreign(
                f"schema {found.schema_version}, and this version reads {SCHEMA_VERSION}"
            )
        if (found.run, found.step) != (self.run, step):
            raise _Foreign(f"of step {found.step} of the run {found.run!r}, not of {self.run!r}")
        if fault := _mask_fault(found):
            raise _Foreign(fault)
        fields = {name: getattr(found, name) for name in Trajectory.model_fields}
        return Trajectory.model_construct(**(fields if tokens else fields | {"tokens": None}))

    def _check(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        attempts, ids = {t.attempt for t in trajectories}, [t.trajectory_id for t in trajectories]
        foreign = [t.trajectory_id for t in trajectories if (t.run, t.step) != (self.run, step)]
        if foreign:
            raise ValueError(f"not of step {step} of the run {self.run!r}: {foreign[:3]}")
        if len(attempts) > 1 or len(ids) != len(set(ids)):
            raise ValueError(
                f"step {step}: attempts {sorted(attempts)}, or an id that stands twice"
            )
        if attempts and min(attempts) < (least := self.next_attempt(step)):
            raise ValueError(f"step {step} is there: done again, it has attempt {least}")
        for trajectory in trajectories:
            if fault := _mask_fault(trajectory):
                raise ValueError(f"{trajectory.trajectory_id}: {fault}")
            for sha256 in trajectory.pictures:
                if sha256 not in self._known and not self._picture_path(sha256).is_file():
                    raise ValueError(f"{trajectory.trajectory_id}: picture {sha256} was not kept")

    def _step_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.jsonl.gz"


def _without_tokens(line: bytes) -> bytes:
    """A line with null in place of its ids, which are cut out before anything is made of them.

    Only the key looks like this, since a text has its quotes escaped; and what stands behind it
    holds no further object. Where another program has written the line otherwise, it stays whole.
    """
    before, key, rest = line.partition(b'"tokens":{')
    ids, end, behind = rest.partition(b"}")
    if not end or b"{" in ids:
        return line
    return b"".join((before, key[:-1], b"null", behind))


class _Foreign(Exception):
    """A line that is whole, and not what should stand there."""


def _mask_fault(trajectory: Trajectory) -> str | None:
    tokens = trajectory.tokens
    if tokens is None:
        return None
    if len(tokens.action_mask) != len(tokens.completion_ids):
        return f"{len(tokens.completion_ids)} ids, an action mask of {len(tokens.action_mask)}"
    if mask_digest(tokens.action_mask) != tokens.mask_digest:
        return "its action mask does not have the digest that was written with it"
    return None


def _claim(folder: Path, run: str) -> None:
    """Say whose the folder is, unless another process has just said so."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "store.json"
    temporary = temporary_of(path)
    temporary.write_text(_Owner(schema_version=SCHEMA_VERSION, run=run).model_dump_json(indent=1))
    try:
        sync(temporary)
        os.link(temporary, path)  # which, unlike a rename, fails where there is one
    except (FileExistsError, FileNotFoundError):  # or it has taken ours away
        pass
    finally:
        temporary.unlink(missing_ok=True)
    sync(folder)


def _read_owner(path: Path) -> _Owner:
    try:
        owner = _Owner.model_validate_json(path.read_bytes())
    except OSError as error:
        what = error.strerror or error
        raise UserError(f"{path}: no trajectories of a run are here: {what}") from None
    except ValidationError as error:
        raise UserError(f"{path}: {describe_faults(error, 'file')}") from None
    if owner.schema_version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: its trajectories have schema {owner.schema_version}, and this version reads "
            f"{SCHEMA_VERSION}: read them with the version of scorekit that wrote them"
        )
    return owner
