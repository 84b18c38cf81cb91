"""Check rows as JSON lines and as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.search.steps.output import write_table


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return rows whose columns or column types appear only in later rows."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        late = number > count // 2
        row: dict[str, Any] = {"id": f"q{number}", "mean": number + 0.5 if late else 1, "pages": []}
        row |= {"note": "가" if late else None, "figures": {"of": number}}
        rows.append(row | ({"pages": ["a_1"], "last": True} if late else {}))
    return rows


def test_a_table_has_one_type_a_column_however_many_rows(tmp_path: Path) -> None:
    for count in (3, 450, 1_201):
        rows = rows_of(count)
        write_table(tmp_path / "rows", iter(rows))
        lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
        table = pq.read_table(tmp_path / "rows.parquet")
        assert dict(zip(table.schema.names, table.schema.types, strict=True)) == {
            "id": pa.string(),
            "mean": pa.float64(),
            "pages": pa.list_(pa.string()),
            "note": pa.string(),
            "figures": pa.string(),
            "last": pa.bool_(),
        }
        packed = [row | {"figures": json.dumps(row["figures"])} for row in rows]
        assert table.to_pylist() == [{"last": None} | row for row in packed]


def test_a_table_of_no_rows_can_be_read(tmp_path: Path) -> None:
    write_table(tmp_path / "rows", [])
    assert (tmp_path / "rows.jsonl").read_bytes() == b""
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_table(tmp_path / name, rows_of(450))
    for kind in ("jsonl", "parquet"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
