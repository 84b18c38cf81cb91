"""Store rows on disk until they are written, in another order and in three formats.

OUT/
    rows.jsonl       for `trainer sft`: ids, action mask, messages, images by their hash
    rows.parquet     the same rows; `messages` as JSON text
    train1.parquet   uid, format_version, messages: for trainers that read only chats
    images/HASH.png  the images of the rows, each once
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainer.search.curation.dataset import CurationResult
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.training.sft_rows import save_images

_AT_ONCE = 200  # rows in a row group of Parquet
_FORMAT = "v1"


class RowSpool:
    """Rows by their id, compressed on disk."""

    def __init__(self) -> None:
        self._rows: DiskSpool[dict[str, Any]] = DiskSpool(dict, compressed=True)
        self._lengths = DiskSpool(int)

    def put(self, row: Mapping[str, Any]) -> None:
        """Store a row."""
        self._rows.append(dict(row), row["id"])
        self._lengths.append(len(row["input_ids"]), row["id"])

    def longest(self, ids: Iterable[str]) -> int:
        """Return the max number of `input_ids` of these rows; 0 without rows."""
        return max((self._lengths[id] for id in ids), default=0)

    def get(self, id: str) -> dict[str, Any]:
        """Return a row."""
        return self._rows[id]


def kept_rows(
    curated: CurationResult,
    spool: RowSpool,
    loader_of: Callable[[Mapping[str, Any]], Callable[[str], bytes]],
) -> Iterator[tuple[dict[str, Any], Callable[[str], bytes]]]:
    """Yield the kept rows in order, each with its image loader (`loader_of`)."""
    for decision in curated.decisions:
        if decision.is_kept:
            row = spool.get(decision.row_id)
            yield row, loader_of(row)


def write_sft_rows(
    folder: Path, rows: Iterable[tuple[Mapping[str, Any], Callable[[str], bytes]]]
) -> None:
    """Write rows in their order and their images, with one row in memory at a time.

    rows: (row, function SHA-256 -> PNG). train1.parquet has no mask, so its readers train on all
    turns of the assistant. Therefore rows with masked turns are not in it.
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
        for number, (row, load_image) in enumerate(rows):
            save_images(folder, row, load_image)
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            table({**row, "messages": json.dumps(row["messages"], ensure_ascii=False)})
            if not row.get("leave_out"):
                chats(train1_row(row, number))


def train1_row(row: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return a row of train1.parquet.

    Images are parts `{"image": path}` of the user's turns, with paths relative to the file; text
    beside an image is a part `{"text": ...}`.
    """
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
    """Open a Parquet file and yield a function that writes a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffered: list[Mapping[str, Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(buffered, schema=schema))
            buffered.clear()

        def write(row: Mapping[str, Any]) -> None:
            buffered.append(row)
            if len(buffered) == _AT_ONCE:
                flush()

        yield write
        flush()
