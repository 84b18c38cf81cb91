"""Rows on their way: kept on the disk, taken out in another order, written for three readers.

OUT/
    rows.jsonl       for `trainer sft`: ids, action mask, messages, pictures by their hash
    rows.parquet     the same; `messages` as JSON text
    train1.parquet   uid, format_version, messages: for trainers that read chats alone
    images/HASH.png  what the rows show, each once
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from trainer.search.curation.spool import Spool, room
from trainer.search.training.sft_rows import keep_pictures

_AT_ONCE = 200  # rows, in a group of Parquet
_FORMAT = "v1"


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a packed row: bytes. ids: `input_ids` of the row."""

    first: int
    length: int
    ids: int


class RowSpool:
    """Rows by their id, packed in a file that goes with the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._places = Spool(_Place)

    def put(self, row: Mapping[str, Any]) -> None:
        """Keep a row."""
        packed = zlib.compress(json.dumps(row, ensure_ascii=False).encode(), 1)
        with room():
            self._file.seek(0, 2)
            place = _Place(self._file.tell(), len(packed), len(row["input_ids"]))
            self._file.write(packed)
        self._places.append(place, row["id"])

    def longest(self, ids: Iterable[str]) -> int:
        """Ids (`input_ids`) of the longest of these rows; 0 of none."""
        return max((self._places[id].ids for id in ids), default=0)

    def get(self, id: str) -> dict[str, Any]:
        """Give it back."""
        place = self._places[id]
        with room():
            self._file.seek(place.first)
            packed = self._file.read(place.length)
        row: dict[str, Any] = json.loads(zlib.decompress(packed))
        return row


@contextmanager
def row_spool() -> Iterator[RowSpool]:
    """An empty one."""
    with TemporaryFile() as file:
        yield RowSpool(file)


def write_sft_rows(
    folder: Path, rows: Iterable[tuple[Mapping[str, Any], Callable[[str], bytes]]]
) -> None:
    """Write rows in their order, one in memory at a time, and their pictures. rows: each with what
    gives a PNG by its hash.

    train1.parquet has no mask: whoever reads it learns every turn of the assistant. So a row with a
    turn that must not be learned is not in it.
    """
    import pyarrow as pa

    ints = pa.list_(pa.int32())
    columns = [("id", pa.string()), ("question_id", pa.string()), ("run", pa.string())]
    columns += [(name, pa.float64()) for name in ("reward", "judge", "ndcg", "rate")]
    columns += [("messages", pa.string()), ("images", pa.list_(pa.string()))]
    columns += [(name, ints) for name in ("input_ids", "action_mask", "leave_out")]
    train1 = pa.schema([(name, pa.string()) for name in ("uid", "format_version", "messages")])
    with ExitStack() as open_files:
        lines = open_files.enter_context((folder / "rows.jsonl").open("w", encoding="utf-8"))
        table = open_files.enter_context(_parquet(folder / "rows.parquet", pa.schema(columns)))
        chats = open_files.enter_context(_parquet(folder / "train1.parquet", train1))
        for number, (row, picture) in enumerate(rows):
            keep_pictures(folder, row, picture)
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            table({**row, "messages": json.dumps(row["messages"], ensure_ascii=False)})
            if not row.get("leave_out"):
                chats(train1_row(row, number))


def train1_row(row: Mapping[str, Any], number: int) -> dict[str, str]:
    """A row as train1.parquet has it: its pictures are parts `{"image": path}` of the user's turns,
    the path beside the file; the words that stand with one are a part `{"text": ...}`."""
    images = iter(row.get("images", ()))
    messages = [
        {"role": message["role"], "content": _parts(message["content"], images)}
        for message in row["messages"]
    ]
    return {
        "uid": f"{row['question_id']}__s{number}__{row['run']}",
        "format_version": _FORMAT,
        "messages": json.dumps(messages, ensure_ascii=False, separators=(",", ":")),
    }


def _parts(content: Any, images: Iterator[str]) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"image": next(images)} if part["type"] == "image" else {"text": part["text"]}
        for part in content
    ]


@contextmanager
def _parquet(path: Path, schema: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A file to which rows are written in groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    held: list[Mapping[str, Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(held, schema=schema))
            held.clear()

        def write(row: Mapping[str, Any]) -> None:
            held.append(row)
            if len(held) == _AT_ONCE:
                flush()

        yield write
        flush()
