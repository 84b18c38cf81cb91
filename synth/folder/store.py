"""Files that survive kill -9: shards written in order, marks of completion.

A shard's output is written under a temporary name and renamed when it is whole; its mark is
written after that. So what has its final name is complete, and what a mark names was there before
the mark. A mark holds the digests of its files, which are compared before they are read. Digests
are of the lines: what compressed them, and how well, changes none.
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

from scorekit.errors import UserError
from scorekit.files import put, remove_folder, remove_temporaries, temporary_of, write_atomic

Record = dict[str, Any]

#: Of zstd: candidates of a source shrink to a tenth, and it costs half of what their JSON does.
_LEVEL = 3
_IN_A_FOLDER = 1000  # shards
#: Of a stage's folder; in the first all shards stood in one folder, as plain JSONL.
_LAYOUT = 2
#: What all stages have rejected, in the folder of the run.
REJECTED = "rejected.jsonl"


def to_line(value: Any) -> bytes:
    """One line of JSON, the same bytes for the same value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def digest_of(value: Any) -> str:
    """128 bits over a JSON value, whatever the order of its keys."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """128 bits over a file's lines: of a compressed one, over what it holds. Raises ValueError for
    one that cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    with open_lines(path) as file:
        try:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        except zstandard.ZstdError as error:
            raise ValueError(f"{path}: {error}") from None
    return digest.hexdigest()


def open_lines(path: Path) -> IO[bytes]:
    """A file of lines to read, whether or not it is compressed."""
    file: IO[bytes] = zstandard.open(path, "rb") if path.suffix == ".zst" else path.open("rb")
    return file


def read_records(path: Path) -> Iterator[Record]:
    """The records of a shard, one by one. Raises ValueError for a line that is no JSON."""
    with open_lines(path) as file:
        for line in io.BufferedReader(cast(io.RawIOBase, file)) if path.suffix == ".zst" else file:
            yield json.loads(line)


class ShardWriter:
    """Writes one file of a shard: under a temporary name until `commit`; with zstd where the name
    ends in .zst."""

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
        """Sync, and give the file its name; the digest of its lines."""
        if self._out is not self._file:
            self._out.close()
        self._file.close()
        put(self._temporary, self.path)
        return self._digest.hexdigest()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._file.closed:  # not committed
            self._file.close()
            self._temporary.unlink(missing_ok=True)


class StageFolder:
    """What one stage has written: out_dir/stages/<name>/.

    stage.json                     config and inputs of the stage, and their digest
    000/shard-00000.jsonl.zst      the records that go on; a thousand shards a folder
    000/rejected-00000.jsonl.zst   those that do not, each with `reason_code` and `stage`
    000/done-00000.json            the mark of the shard: counts, digests of its input and its files
    000/open-00000.json            of a shard that is not done: records that are left open, by code
    service-NAME.json              what the service said of itself that the stage asks
    """

    def __init__(self, out_dir: Path, name: str) -> None:
        self.name = name
        self.out_dir = out_dir
        self.path = out_dir / "stages" / name

    def shard(self, index: int) -> Path:
        """The records of a shard that go on."""
        return self._place(f"shard-{index:05d}.jsonl.zst", index)

    def rejected(self, index: int) -> Path:
        """The records of a shard that do not."""
        return self._place(f"rejected-{index:05d}.jsonl.zst", index)

    def _mark_path(self, index: int) -> Path:
        return self._place(f"done-{index:05d}.json", index)

    def _open_path(self, index: int) -> Path:
        return self._place(f"open-{index:05d}.json", index)

    def _place(self, name: str, index: int) -> Path:
        return self.path / f"{index // _IN_A_FOLDER:03d}" / name

    def lock(self, index: int | None = None) -> Path:
        """The lock of a shard, or of the whole stage. Not in the stage's own folder, which a
        clearing takes away."""
        name = self.name if index is None else f"{self.name}-{index:05d}"
        return self.out_dir / ".locks" / f"{name}.lock"

    def mark(self, index: int) -> dict[str, Any] | None:
        """The mark of a shard; None while it is not done."""
        return _unsealed(self._mark_path(index), f"mend it with {self._repair(index)}")

    def set_mark(self, index: int, mark: Mapping[str, Any]) -> None:
        """Say that a shard is done. Its files must be committed before."""
        write_atomic(self._mark_path(index), to_line(_sealed(mark)), alone=True)
        self._open_path(index).unlink(missing_ok=True)

    def left_open(self, index: int) -> dict[str, int]:
        """Records of a shard that are left open, by code; empty for one that is done, or that
        nobody has worked on."""
        if self._mark_path(index).exists():
            return {}
        return dict((read_json(self._open_path(index), "open") or {"open": {}})["open"])

    def set_open(self, index: int, codes: Mapping[str, int]) -> None:
        """Say that records of a shard are left open."""
        content = to_line({"open": dict(sorted(codes.items()))})
        write_atomic(self._open_path(index), content, alone=True)

    def _repair(self, index: int) -> str:
        return f"`run --stage {self.name} --repair {index}`"

    def verify(self, index: int) -> None:
        """Return if the files of a shard are those that its mark was written for. Raises UserError
        that says how to mend it."""
        mark = self.mark(index)
        if mark is None:
            raise UserError(f"{self.path}: shard {index} is not done; resume that stage first")
        wanted = {} if mark.get("let_go") else {self.shard(index): mark["digest"]}
        if mark.get("rejected_digest"):
            wanted[self.rejected(index)] = mark["rejected_digest"]
        self._compare(wanted, index)

    def _compare(self, wanted: Mapping[Path, str], index: int) -> None:
        for path, digest in wanted.items():
            fault = _fault(path, digest)
            if fault:
                raise UserError(f"{path}: it {fault}: mend it with {self._repair(index)}")

    def verify_all(self) -> None:
        """As `verify`, for every shard of a stage that one process makes as a whole: none of them
        may be missing."""
        self.verify_marks()
        for index in range(self.shards() or 0):
            self.verify(index)

    def verify_marks(self) -> None:
        """Raise UserError where a mark of such a stage is gone."""
        for index in self.missing():
            raise UserError(
                f"{self._mark_path(index)}: it is gone: mend it with {self._repair(index)}"
            )

    def verify_input(self, index: int) -> None:
        """As `verify`, and the records are there to be read."""
        self.verify(index)
        if (self.mark(index) or {}).get("let_go"):
            raise UserError(
                f"{self.shard(index)}: was let go when the stage after it was done; make it again "
                f"from the kept answers with `run --stage {self.name} --overwrite` (or "
                f"`--repair {index}` for this shard alone)"
            )

    def let_go(self, index: int) -> None:
        """Delete the records of a shard that nobody reads any more; its mark stays. The mark says
        so first: a file that is gone without it would be damage."""
        mark = self.mark(index)
        if mark is not None and not mark.get("let_go"):
            self.set_mark(index, {**mark, "let_go": True})
        self.shard(index).unlink(missing_ok=True)

    def drop(self, index: int) -> None:
        """Take the mark from a shard, so that it is made again."""
        self._mark_path(index).unlink(missing_ok=True)

    def manifest(self) -> dict[str, Any] | None:
        """What the stage was begun with; None where it was not begun. Raises UserError for a folder
        of an earlier version."""
        mend = f"`run --stage {self.name} --overwrite` makes the stage again from the kept answers"
        path = self.path / "stage.json"
        if (read_json(path, mend=mend) or {"layout": _LAYOUT}).get("layout") != _LAYOUT:
            raise UserError(
                f"{self.path}: was written by another version of scorekit: finish it with that "
                "one, or begin a new run.out_dir with run.answers: "
                f"{self.out_dir / 'answers.sqlite'} (what was paid for is found there)"
            )
        return _unsealed(path, mend)

    def manifest_digest(self) -> str | None:
        """The digest of what the stage was begun with."""
        manifest = self.manifest()
        return None if manifest is None else manifest["digest"]

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Say what the stage is begun with."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = _sealed({"layout": _LAYOUT, **manifest})
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_atomic(self.path / "stage.json", text.encode())

    def service(self, name: str) -> Path:
        """What a service said of itself when the stage first asked it."""
        return self.path / f"service-{name}.json"

    def clear(self) -> None:
        """Delete all of it. A mark without its stage.json would be taken for one of the next
        beginning, so that the folder loses its name first."""
        remove_folder(self.path)

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
        """All records that go on, in order. Raises UserError where a shard was changed."""
        for index in range(self.shards() or 0):
            self.verify_input(index)
            yield from read_records(self.shard(index))

    def all_rejected(self) -> Iterator[Record]:
        """All records that do not, in order. Raises UserError where a shard was changed."""
        for index in range(self.shards() or 0):
            path, mark = self.rejected(index), self.mark(index) or {}
            if "rejected_digest" in mark:
                self._compare({path: mark["rejected_digest"]}, index)
            if path.exists():
                yield from read_records(path)


def _sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """With a digest of its own: a changed number of records would lose the others in silence."""
    return {**content, "seal": digest_of(content)}


def _unsealed(path: Path, mend: str) -> dict[str, Any] | None:
    content = read_json(path, "seal", mend=mend)
    if content is not None and content.pop("seal") != digest_of(content):
        raise UserError(f"{path}: it was changed since it was written: {mend}")
    return content


def _fault(path: Path, digest: str) -> str | None:
    """What is wrong with a file that should hold lines of this digest."""
    if not path.exists():
        return "is gone"
    try:
        return None if digest_file(path) == digest else "was changed since it was written"
    except ValueError:
        return "cannot be read"


def read_json(
    path: Path, *needs: str, mend: str = "delete it, and `run --resume` makes it again"
) -> dict[str, Any] | None:
    """A JSON object that a run keeps in a file of its own; None where there is no such file.

    needs: keys that it must have. mend: what to do about one that is damaged; it is told in the
    UserError that is raised then."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= {*needs}:
        raise UserError(f"{path}: it is damaged: {mend}")
    return content
