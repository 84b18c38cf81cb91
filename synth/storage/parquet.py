"""Write a Parquet file under a temporary name until it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scorekit.files import replace_file
from synth.storage.store import Record

if TYPE_CHECKING:
    import pyarrow


class ParquetFile:
    """Writes one row group for each batch.

    memory: bytes of the columns when they are loaded.
    """

    def __init__(self, path: Path, columns: pyarrow.Schema, compression: str) -> None:
        import pyarrow.parquet

        self.path = path
        self.memory = 0
        self._columns = columns
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer = pyarrow.parquet.ParquetWriter(
            self._temporary, columns, compression=compression
        )

    def write(self, rows: list[Record]) -> None:
        """Append a row group."""
        import pyarrow

        table = pyarrow.Table.from_pylist(rows, schema=self._columns)
        self.memory += table.nbytes
        self._writer.write_table(table)

    def commit(self) -> None:
        """Sync the file and give it its final name."""
        self._writer.close()
        replace_file(self._temporary, self.path)

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)
