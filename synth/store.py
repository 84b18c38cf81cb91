"""Files that survive kill -9: journals of answers, shards written in order, marks of completion.

A journal is append-only; a torn last line is cut off when it is opened again. A shard's output is
written under a temporary name and renamed when it is whole; its mark is written after that. So
what has its final name is complete, and what a mark names was there before the mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from scorekit.errors import UserError

Record = dict[str, Any]


def to_line(value: Any) -> bytes:
    """One line of JSON, the same bytes for the same value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def digest_of(value: Any) -> str:
    """128 bits over a JSON value, whatever the order of its keys."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """128 bits over a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_records(path: Path) -> Iterator[Record]:
    """The records of a shard, one by one. Raises ValueError for a line that is no JSON."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file: the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """Answers under a key of their request's content, appended as they come.

    An answer is with the kernel when `put` returns, so that kill -9 does not lose it; it is synced
    to the disk after `fsync_records` answers or `fsync_s` seconds, for the day the power fails.
    Only offsets are held in memory.
    """

    def __init__(self, path: Path, *, fsync_records: int, fsync_s: float) -> None:
        """Raises UserError where another process has it open: both would write the same shard."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fsync_records = fsync_records
        self._fsync_s = fsync_s
        self._where: dict[str, tuple[int, int]] = {}  # key -> offset and length of its line
        self._file: IO[bytes] = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes with the process
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"{path}: another process is at this shard: let it end, or give each machine a "
                "--shard-id of its own"
            ) from None
        self._end = self._index()
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def _index(self) -> int:
        """Read the keys; cut off a last line that is not whole. The length of what is good."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    key = json.loads(line)["k"] if line.endswith(b"\n") else None
                except (ValueError, TypeError, KeyError):
                    key = None
                if not isinstance(key, str):
                    break
                self._where[key] = (end, len(line))
                end += len(line)
        if end < self._path.stat().st_size:
            self._file.truncate(end)
        return end

    def __len__(self) -> int:
        return len(self._where)

    def get(self, key: str) -> Any:
        """The answer under a key; None without one."""
        place = self._where.get(key)
        if place is None:
            return None
        return json.loads(os.pread(self._file.fileno(), place[1], place[0]))["a"]

    def put(self, key: str, answer: Any) -> None:
        """Append an answer."""
        line = to_line({"k": key, "a": answer})
        view = memoryview(line)
        while view:  # a write may be a part of it
            view = view[self._file.write(view) :]
        self._where[key] = (self._end, len(line))
        self._end += len(line)
        self._unsynced += 1
        late = time.monotonic() - self._synced_at >= self._fsync_s
        if self._unsynced >= self._fsync_records or late:
            self.sync()

    def sync(self) -> None:
        """Put what was appended on the disk."""
        if self._unsynced:
            os.fsync(self._file.fileno())
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()

    def remove(self) -> None:
        """Close, and delete the file: its shard is done."""
        self.close()
        self._path.unlink(missing_ok=True)


class ShardWriter:
    """Writes one file of a shard: under a temporary name until `commit`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = self._temporary.open("wb")
        self._digest = hashlib.blake2b(digest_size=16)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        line = to_line(record)
        self._file.write(line)
        self._digest.update(line)
        self.records += 1

    def commit(self) -> str:
        """Sync, and give the file its name; the digest of its bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        _sync_folder(self.path.parent)
        return self._digest.hexdigest()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._file.closed:  # not committed
            self._file.close()
            self._temporary.unlink(missing_ok=True)


class StageFolder:
    """What one stage has written: out_dir/stages/<name>/.

    stage.json          config and inputs of the stage, and their digest
    shard-00000.jsonl   the records that go on
    rejected-00000.jsonl  the records that do not, each with `reason_code` and `stage`
    done-00000.json     the mark of the shard: counts, digests of its input and its files
    journal-00000.jsonl answers of a shard in work
    service-NAME.json   what the service said of itself that the stage asks
    """

    def __init__(self, out_dir: Path, name: str) -> None:
        self.name = name
        self.out_dir = out_dir
        self.path = out_dir / "stages" / name

    def shard(self, index: int) -> Path:
        """The records of a shard that go on."""
        return self.path / f"shard-{index:05d}.jsonl"

    def rejected(self, index: int) -> Path:
        """The records of a shard that do not."""
        return self.path / f"rejected-{index:05d}.jsonl"

    def journal(self, index: int) -> Path:
        """The answers of a shard in work."""
        return self.path / f"journal-{index:05d}.jsonl"

    def mark(self, index: int) -> dict[str, Any] | None:
        """The mark of a shard; None while it is not done."""
        return _read_json(self.path / f"done-{index:05d}.json")

    def set_mark(self, index: int, mark: Mapping[str, Any]) -> None:
        """Say that a shard is done. Its files must be committed before."""
        write_atomic(self.path / f"done-{index:05d}.json", to_line(mark))

    def manifest(self) -> dict[str, Any] | None:
        """What the stage was begun with; None where it was not begun."""
        return _read_json(self.path / "stage.json")

    def manifest_digest(self) -> str | None:
        """The digest of what the stage was begun with."""
        manifest = self.manifest()
        return None if manifest is None else manifest["digest"]

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Say what the stage is begun with."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(manifest, ensure_ascii=False, indent=1) + "\n"
        write_atomic(self.path / "stage.json", text.encode())

    def service(self, name: str) -> Path:
        """What a service said of itself when the stage first asked it."""
        return self.path / f"service-{name}.json"

    def clear(self) -> None:
        """Delete all of it. A mark without its stage.json would be taken for one of the next
        beginning, so that the folder loses its name first."""
        gone = self.path.with_name(f".{self.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        if self.path.exists():
            self.path.rename(gone)
            shutil.rmtree(gone)

    def shards(self) -> int | None:
        """How many shards the stage has; None while that is not known."""
        manifest = self.manifest()
        return None if manifest is None else manifest.get("shards")

    def missing(self) -> list[int]:
        """Shards that are not done."""
        return [i for i in range(self.shards() or 0) if self.mark(i) is None]

    def done(self) -> bool:
        """Whether every shard is done."""
        return self.shards() is not None and not self.missing()

    def records(self) -> Iterator[Record]:
        """All records that go on, in order."""
        for index in range(self.shards() or 0):
            yield from read_records(self.shard(index))

    def all_rejected(self) -> Iterator[Record]:
        """All records that do not, in order."""
        for index in range(self.shards() or 0):
            if self.rejected(index).exists():
                yield from read_records(self.rejected(index))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else None
