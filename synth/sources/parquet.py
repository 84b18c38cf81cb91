"""The sources that were sampled, as one Parquet file."""

from __future__ import annotations

from pathlib import Path

from scorekit.files import replace_file
from synth.storage.store import Record


class SourcesParquet:
    """sampled_sources.parquet, a row group a shard; under a temporary name until `commit`."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        madlad = pa.struct(
            [
                ("lang", pa.string()),
                ("split", pa.string()),
                ("doc_id", pa.string()),
                ("file", pa.string()),
                ("line", pa.int64()),
                ("span", pa.list_(pa.int64())),
                ("segment_index", pa.int64()),
                ("segments", pa.int64()),
                ("url", pa.string()),
            ]
        )
        self._schema = pa.schema(
            [
                ("source_id", pa.string()),
                ("source_text", pa.string()),
                ("source_type", pa.string()),
                ("length", pa.float64()),
                ("length_bucket_id", pa.int32()),
                ("source_meta", pa.struct([("madlad", madlad)])),
            ]
        )
        self._writer = pq.ParquetWriter(self._temporary, self._schema)

    def write(self, records: list[Record]) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(records, schema=self._schema))

    def commit(self) -> None:
        self._writer.close()
        replace_file(self._temporary, self._path)

    def __enter__(self) -> SourcesParquet:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)
