"""export: the pairs as JSONL and Parquet, with where each comes from, and a card that sums it up.

Nothing that changes from run to run of the same config goes in: no times, no retries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from scorekit.errors import UserError
from scorekit.languages import short_tag
from synth.config import SynthConfig, languages
from synth.record import teacher_seed
from synth.store import Record, ShardWriter, StageFolder, read_json

if TYPE_CHECKING:
    import pyarrow

    from synth.context import Context

FOLDER = "export"
TRAIN, PAIRS = "train", "pairs"
_VERSIONS = ("scorekit", "torch", "transformers")
_BATCH = 5000  # rows of a Parquet row group


class Export:
    """Writes out_dir/export/: train.jsonl, train.parquet, README.md; pairs.* by option."""

    name = "export"
    after: str | None = "format_filter"

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the records hold beside the input. Not the teacher's URL: it may have moved."""
        return {
            **cfg.export.model_dump(mode="json"),
            "src_lang": cfg.data.src_lang,
            "tgt_lang": cfg.data.tgt_lang,
            "num_candidates": cfg.final_generation.num_candidates,
            "teacher": cfg.teacher.model_dump(mode="json", include={"model", "generation"}),
            "checkpoint": cfg.metricx.checkpoint,
            "seed": cfg.run.seed,
        }

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None:
        """Raises UserError where the filter has not looked at every shard."""
        from synth.card import write_card

        source = ctx.input_of(self)
        if not source.done():
            raise UserError(f"{source.path}: not done; resume --stage {source.name} first")
        folder = ctx.out_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        make = row_maker(ctx.cfg, scorer_versions(ctx))
        records = islice(source.records(), ctx.limit)
        count, digest = write_rows(folder, TRAIN, ctx.cfg, map(make, records), arrow_schema())
        ctx.stats.records_in = ctx.stats.records_out = count
        counts = {TRAIN: count}
        pairs = pair_rows(ctx.cfg, islice(source.records(), ctx.limit))
        if ctx.cfg.export.preference_pairs:
            counts[PAIRS], _ = write_rows(folder, PAIRS, ctx.cfg, pairs, _pair_schema())
        else:
            for kind in ("jsonl", "parquet"):
                (folder / f"{PAIRS}.{kind}").unlink(missing_ok=True)
        write_card(folder / "README.md", ctx, counts)
        own = ctx.folder(self.name)
        own.set_manifest({**manifest, "shards": 1})
        own.set_mark(0, {"records": count, "rejected": {}, "input": manifest["input"],
                         "digest": digest})  # fmt: skip


def row_maker(cfg: SynthConfig, metricx: dict[str, Any]) -> Callable[[Record], Record]:
    """A function of a record that passed all filters to its row, checked against the schema."""
    codes = _codes(cfg)
    teacher = {
        "backend": cfg.teacher.backend,
        "base_url": bare_url(cfg.teacher.base_url),
        "model": cfg.teacher.model,
    }
    check = row_check()

    def make(record: Record) -> Record:
        row = {
            **codes,
            "source_text": record["source_text"],
            "target_text": record["target_text"],
            "metricx_qe_score_best": record["best"]["score"],
            "selection": {
                "madlad": record["source_meta"]["madlad"],
                "teacher": {**teacher, "sampling_params": sampling_params(cfg, record)},
                "metricx": metricx,
                "filters": _filters(record["filters"]),
            },
        }
        check(row)
        return row

    return make


def sampling_params(cfg: SynthConfig, record: Record) -> dict[str, Any]:
    """How the teacher was asked for this source, as it was sent: three requests.

    `candidate` of `final`: the one that was chosen; its own seed is `seed + candidate`.
    """
    from scorekit.llm import Sampling

    generation = cfg.teacher.generation
    blob = record["source_type"] == "blob"
    base = cfg.run.seed if generation.seed is None else generation.seed

    def block(purpose: str, temperature: float) -> dict[str, Any]:
        sampling = Sampling(
            max_tokens=generation.max_tokens_blob if blob else generation.max_tokens,
            temperature=temperature,
            top_p=generation.top_p,
            seed=teacher_seed(base, record["source_id"], purpose),
        )
        return {"n": 1, **asdict(sampling), "stop": list(sampling.stop), "candidate": None}

    return {
        "prefilter_greedy": block("prefilter", generation.greedy_temperature),
        "prefilter_sample": block("prefilter", generation.sample_temperature),
        "final": {
            **block("final", generation.final_temperature),
            "n": cfg.final_generation.num_candidates,
            "candidate": record["best"]["index"],
        },
    }


def _filters(filters: dict[str, Any]) -> dict[str, Any]:
    """The same keys in each row, so that the columns have one type."""
    judge = filters["judge"]
    outcome = "not_asked" if judge is None else "error" if "error" in judge else "pass"
    texts = {key: (judge or {}).get(key) or "" for key in ("reason_code", "notes", "error")}
    return {
        "passed": filters["passed"],
        "failed": filters["failed"],
        "judge": {"outcome": outcome, **texts},
        "tried": filters["tried"],
    }


def scorer_versions(ctx: Context) -> dict[str, Any]:
    """What the scoring service said of itself when the candidates were scored."""
    folders = [folder for folder in (ctx.out_dir, ctx.inputs) if folder is not None]
    stages = [StageFolder(folder, "score_select_best").service("metricx") for folder in folders]
    for path in (*stages, *(folder / "service-metricx.json" for folder in folders)):
        if (info := read_json(path, "versions")) is not None:
            return {
                "checkpoint": ctx.cfg.metricx.checkpoint,
                **{key: info.get(key) for key in ("model", "revision", "dtype", "commit")},
                "max_input_length": info.get("max_input_length"),
                "versions": {k: info["versions"].get(k) for k in _VERSIONS},
            }
    raise UserError(f"{ctx.out_dir}: no service-metricx.json; run --stage score_select_best first")


def bare_url(url: str) -> str:
    """A URL without user, password, query and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


@cache
def schema() -> dict[str, Any]:
    """JSON Schema of a row of train.jsonl: synth/export.schema.json."""
    path = Path(__file__).parents[1] / "export.schema.json"
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def row_check() -> Callable[[Record], None]:
    """A function that raises ValueError for a row which is not of the schema: our bug."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema())

    def check(row: Record) -> None:
        for error in validator.iter_errors(row):
            raise ValueError(f"export: {error.json_path}: {error.message[:300]}")

    return check


def write_rows(
    folder: Path, name: str, cfg: SynthConfig, rows: Iterator[Record], columns: pyarrow.Schema
) -> tuple[int, str]:
    """<name>.jsonl and <name>.parquet in one pass; how many rows, and the digest of the JSONL
    bytes. A format that is not asked for is taken away, should it stand there from before.
    """
    formats = cfg.export.formats
    lines = ShardWriter(folder / f"{name}.jsonl")
    table = _ParquetFile(folder / f"{name}.parquet", columns)
    with lines, table:
        while batch := list(islice(rows, _BATCH)):
            for row in batch:
                lines.write(row)
            table.write(batch)
        table.commit()
        digest = lines.commit()
    for path in (lines.path, table.path):
        if path.suffix[1:] not in formats:
            path.unlink()
    return lines.records, digest


class _ParquetFile:
    """Under a temporary name until `commit`."""

    def __init__(self, path: Path, columns: pyarrow.Schema) -> None:
        import pyarrow.parquet

        self.path = path
        self._columns = columns
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer = pyarrow.parquet.ParquetWriter(self._temporary, columns, compression="zstd")

    def write(self, rows: list[Record]) -> None:
        """Append a row group."""
        import pyarrow

        self._writer.write_table(pyarrow.Table.from_pylist(rows, schema=self._columns))

    def commit(self) -> None:
        """Sync, and give the file its name."""
        self._writer.close()
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)

    def __enter__(self) -> _ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


@cache
def arrow_schema() -> pyarrow.Schema:
    """The columns of train.parquet, made from the JSON Schema so that both say the same."""
    import pyarrow

    return pyarrow.schema(
        [pyarrow.field(name, _arrow_type(kind)) for name, kind in schema()["properties"].items()]
    )


def _arrow_type(kind: dict[str, Any]) -> pyarrow.DataType:
    import pyarrow

    if "$ref" in kind:
        return _arrow_type(schema()["$defs"][kind["$ref"].rpartition("/")[2]])
    names = [kind["type"]] if isinstance(kind["type"], str) else kind["type"]
    name = next(name for name in names if name != "null")
    if name == "object":
        fields = kind["properties"].items()
        return pyarrow.struct([pyarrow.field(key, _arrow_type(value)) for key, value in fields])
    if name == "array":
        return pyarrow.list_(_arrow_type(kind["items"]))
    simple = {"string": pyarrow.string(), "integer": pyarrow.int64(),
              "number": pyarrow.float64(), "boolean": pyarrow.bool_()}  # fmt: skip
    return simple[name]


def pair_rows(cfg: SynthConfig, records: Iterable[Record]) -> Iterator[Record]:
    """The chosen translation against the worst candidate; margin: how much worse that one scored.

    A source without another candidate that was scored worse gives none.
    """
    codes = _codes(cfg)
    for record in records:
        best, worst = record["best"], record["worst"]
        if worst is None or worst["text"] == best["text"] or worst["score"] <= best["score"]:
            continue
        yield {
            **codes,
            "source_text": record["source_text"],
            "chosen": best["text"],
            "rejected": worst["text"],
            "metricx_qe_score_chosen": best["score"],
            "metricx_qe_score_rejected": worst["score"],
            "margin": worst["score"] - best["score"],
        }


def _pair_schema() -> pyarrow.Schema:
    import pyarrow

    texts = ("pair_id", "source_lang_code", "target_lang_code", "source_text", "chosen", "rejected")
    numbers = ("metricx_qe_score_chosen", "metricx_qe_score_rejected", "margin")
    return pyarrow.schema(
        [(name, pyarrow.string()) for name in texts]
        + [(name, pyarrow.float64()) for name in numbers]
    )


def _codes(cfg: SynthConfig) -> dict[str, str]:
    source, target = languages(cfg)
    return {
        "pair_id": f"{short_tag(source)}->{short_tag(target)}",
        "source_lang_code": source,
        "target_lang_code": target,
    }
