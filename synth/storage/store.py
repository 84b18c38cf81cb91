"""Storage of a stage that survives kill -9: shards and their completion marks.

A shard's output is written under a temporary name and renamed when complete; its mark is written
afterwards. So a file with its final name is complete, and exists before its mark. A mark has the
digests of its files, which are compared before reading. Digests are over uncompressed lines, so the
compression does not matter.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import (
    remove_folder,
    remove_temporaries,
    replace_file,
    temporary_of,
    write_atomic,
)

Record = dict[str, Any]

#: zstd level: candidates shrink to a tenth, at half the cost of encoding their JSON.
_LEVEL = 3
_IN_A_FOLDER = 1000  # shards
#: Version of a stage folder's layout; version 1 had plain JSONL in one folder.
_LAYOUT = 2
#: File in the run's folder with the rejected records of all stages.
REJECTED = "rejected.jsonl"


def to_line(value: Any) -> bytes:
    """Return one line of JSON; equal values give equal bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def digest_of(value: Any) -> str:
    """Return 128 bits in hex over a JSON value, independent of the order of keys."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """Return 128 bits in hex over a file's uncompressed lines.

    Raises ValueError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    with open_lines(path) as file:
        try:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        except zstandard.ZstdError as error:
            raise ValueError(f"{path}: {error}") from None
    return digest.hexdigest()


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines for reading, compressed or not."""
    file: IO[bytes] = zstandard.open(path, "rb") if path.suffix == ".zst" else path.open("rb")
    return file


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a shard. Raises ValueError for a line that is not JSON."""
    with open_lines(path) as file:
        for line in io.BufferedReader(cast(io.RawIOBase, file)) if path.suffix == ".zst" else file:
            yield parse_json(line)


class ShardWriter:
    """Writes one file of a shard, under a temporary name until `commit`.

    It is compressed with zstd if the name ends in .zst."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records = 0
        remove_temporaries(path.parent, escape(path.name))
        self._temporary = temporary_of(path)
        self._file = self._temporary.open("wb")
        self._out: Any = self._file
        if path.suffix == ".zst":
            compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
            self._out = compressor.stream_writer(self._file, closefd=False)
        self._digest = hashlib.blake2b(digest_size=16)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        line = to_line(record)
        self._out.write(line)
        self._digest.update(line)
        self.records += 1

    def commit(self) -> str:
        """Sync the file and give it its final name; return the digest of its lines."""
        if self._out is not self._file:
            self._out.close()
        self._file.close()
        replace_file(self._temporary, self.path)
        return self._digest.hexdigest()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._file.closed:  # not committed
            self._file.close()
            self._temporary.unlink(missing_ok=True)


class StageFolder:
    """The output of one stage: out_dir/stages/<name>/.

    stage.json                     config and inputs of the stage, and their digest
    000/shard-00000.jsonl.zst      the accepted records; a thousand shards per folder
    000/rejected-00000.jsonl.zst   the rejected records, each with `reason_code` and `stage`
    000/done-00000.json            the mark of the shard: counts, digests of its input and its files
    000/open-00000.json            of an unfinished shard: number of open records, by code
    service-NAME.json              the info of a service that the stage calls
    """

    def __init__(self, out_dir: Path, name: str) -> None:
        self.name = name
        self.out_dir = out_dir
        self.path = out_dir / "stages" / name

    def shard(self, index: int) -> Path:
        """Return the file of a shard's accepted records."""
        return self._path_of(f"shard-{index:05d}.jsonl.zst", index)

    def rejected(self, index: int) -> Path:
        """Return the file of a shard's rejected records."""
        return self._path_of(f"rejected-{index:05d}.jsonl.zst", index)

    def _mark_path(self, index: int) -> Path:
        return self._path_of(f"done-{index:05d}.json", index)

    def _open_path(self, index: int) -> Path:
        return self._path_of(f"open-{index:05d}.json", index)

    def _path_of(self, name: str, index: int) -> Path:
        return self.path / f"{index // _IN_A_FOLDER:03d}" / name

    def lock(self, index: int | None = None) -> Path:
        """Return the lock of a shard, or of the stage. It is outside the stage's folder, which
        clearing removes."""
        name = self.name if index is None else f"{self.name}-{index:05d}"
        return self.out_dir / ".locks" / f"{name}.lock"

    def mark(self, index: int) -> dict[str, Any] | None:
        """Return the mark of a shard; None while it is not done."""
        return _unseal(self._mark_path(index), f"repair it with {self._repair(index)}")

    def set_mark(self, index: int, mark: Mapping[str, Any]) -> None:
        """Mark a shard as done. Its files must be committed before."""
        write_atomic(self._mark_path(index), to_line(_seal(mark)), alone=True)
        self._open_path(index).unlink(missing_ok=True)

    def left_open(self, index: int) -> dict[str, int]:
        """Return the number of a shard's open records by code; empty if it is done or not
        started."""
        if self._mark_path(index).exists():
            return {}
        return dict((read_json(self._open_path(index), "open") or {"open": {}})["open"])

    def set_open(self, index: int, codes: Mapping[str, int]) -> None:
        """Store the number of a shard's open records by code."""
        content = to_line({"open": dict(sorted(codes.items()))})
        write_atomic(self._open_path(index), content, alone=True)

    def _repair(self, index: int) -> str:
        return f"`run --stage {self.name} --repair {index}`"

    def verify(self, index: int) -> None:
        """Raise UserError with a repair command if a shard's files do not fit its mark."""
        mark = self.mark(index)
        if mark is None:
            raise UserError(f"{self.path}: shard {index} is not done. Resume that stage first")
        digest_by_path = {} if mark.get("let_go") else {self.shard(index): mark["digest"]}
        if mark.get("rejected_digest"):
            digest_by_path[self.rejected(index)] = mark["rejected_digest"]
        self._compare(digest_by_path, index)

    def _compare(self, digest_by_path: Mapping[Path, str], index: int) -> None:
        for path, digest in digest_by_path.items():
            error = _file_error(path, digest)
            if error:
                raise UserError(f"{path}: it {error}. Repair it with {self._repair(index)}")

    def verify_marks(self) -> None:
        """Raise UserError if a mark of a stage that one process writes is missing."""
        for index in self.missing():
            raise UserError(
                f"{self._mark_path(index)}: it is missing. Repair it with {self._repair(index)}"
            )

    def verify_input(self, index: int) -> None:
        """Verify a shard, and raise UserError if its records were deleted."""
        self.verify(index)
        if (self.mark(index) or {}).get("let_go"):
            raise UserError(
                f"{self.shard(index)}: was deleted after the next stage was done. Make it again "
                f"from the cached answers with `run --stage {self.name} --overwrite` (or "
                f"`--repair {index}` for this shard only)"
            )

    def delete_records(self, index: int) -> None:
        """Delete the records of a shard that are no longer needed; its mark stays.

        The mark is updated first, because a missing file would otherwise count as damage."""
        mark = self.mark(index)
        if mark is not None and not mark.get("let_go"):
            self.set_mark(index, {**mark, "let_go": True})
        self.shard(index).unlink(missing_ok=True)

    def drop(self, index: int) -> None:
        """Remove a shard's mark, so that it is made again."""
        self._mark_path(index).unlink(missing_ok=True)

    def manifest(self) -> dict[str, Any] | None:
        """Return the stage's manifest; None if it was not started.

        Raises UserError for a folder of an earlier version."""
        repair_hint = (
            f"`run --stage {self.name} --overwrite` makes it again from the cached answers"
        )
        path = self.path / "stage.json"
        if (read_json(path, hint=repair_hint) or {"layout": _LAYOUT}).get("layout") != _LAYOUT:
            raise UserError(
                f"{self.path}: was written by another version of scorekit. Finish it with that "
                "one, or start in a new run.out_dir with run.answers: "
                f"{self.out_dir / 'answers.sqlite'} (which has the paid answers)"
            )
        return _unseal(path, repair_hint)

    def manifest_digest(self) -> str | None:
        """Return the digest of the stage's manifest."""
        manifest = self.manifest()
        return None if manifest is None else manifest["digest"]

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the stage's manifest."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = _seal({"layout": _LAYOUT, **manifest})
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_atomic(self.path / "stage.json", text.encode())

    def service(self, name: str) -> Path:
        """Return the file with a service's info from the stage's first call."""
        return self.path / f"service-{name}.json"

    def clear(self) -> None:
        """Delete the folder. It is renamed first, because a mark without stage.json would count for
        the next start."""
        remove_folder(self.path)

    def shards(self) -> int | None:
        """Return the number of shards; None while it is unknown."""
        manifest = self.manifest()
        return None if manifest is None else manifest.get("shards")

    def missing(self) -> list[int]:
        """Return the shards that are not done."""
        return [i for i in range(self.shards() or 0) if self.mark(i) is None]

    def done(self) -> bool:
        """Return True if every shard is done."""
        return self.shards() is not None and not self.missing()

    def records(self) -> Iterator[Record]:
        """Yield all accepted records in order. Raises UserError for a changed shard."""
        for index in range(self.shards() or 0):
            self.verify_input(index)
            yield from read_records(self.shard(index))

    def all_rejected(self) -> Iterator[Record]:
        """Yield all rejected records in order. Raises UserError for a changed shard."""
        for index in range(self.shards() or 0):
            path, mark = self.rejected(index), self.mark(index) or {}
            if "rejected_digest" in mark:
                self._compare({path: mark["rejected_digest"]}, index)
            if path.exists():
                yield from read_records(path)


def _seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its digest: a changed number of records would silently lose
    others."""
    return {**content, "seal": digest_of(content)}


def _unseal(path: Path, repair_hint: str) -> dict[str, Any] | None:
    content = read_json(path, "seal", hint=repair_hint)
    if content is not None and content.pop("seal") != digest_of(content):
        raise UserError(f"{path}: it has changed since it was written: {repair_hint}")
    return content


def _file_error(path: Path, digest: str) -> str | None:
    """Return the error of a file that should have this digest; None if it is right."""
    if not path.exists():
        return "is missing"
    try:
        return None if digest_file(path) == digest else "has changed since it was written"
    except ValueError:
        return "cannot be read"


def read_json(
    path: Path, *needs: str, hint: str = "delete it, and `run --resume` makes it again"
) -> dict[str, Any] | None:
    """Return the JSON object of a file of the run; None if there is no such file.

    needs: required keys.
    hint: how to repair a damaged file, for the UserError."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= {*needs}:
        raise UserError(f"{path}: it is damaged: {hint}")
    return content
