"""Rows of the export and their schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from jsonschema_rs import Draft202012Validator, ValidationError

from scorekit.languages import short_tag
from scorekit.llm import Sampling
from synth.config import SynthConfig, languages
from synth.record import teacher_seed
from synth.storage.store import Record

if TYPE_CHECKING:
    import pyarrow


def row_maker(cfg: SynthConfig, metricx: dict[str, Any]) -> Callable[[Record], Record]:
    """Return a function from an accepted record to its row, checked against the schema.

    A row has every key of the schema; missing values are null.
    """
    codes = pair_codes(cfg)
    teacher = {
        "backend": cfg.teacher.backend,
        "base_url": bare_url(cfg.teacher.base_url),
        "model": cfg.teacher.model,
    }
    madlad_keys = dict.fromkeys(schema()["$defs"]["madlad"]["properties"])
    sampling = sampling_maker(cfg)
    check = row_check()

    def make(record: Record) -> Record:
        prefilter = record["prefilter"]
        row = {
            **codes,
            "source_text": record["source_text"],
            "target_text": record["target_text"],
            "metricx_qe_score_best": record["best"]["score"],
            "source_id": record["source_id"],
            "kind": record["source_type"],
            "bucket": record["length_bucket_id"],
            "prefilter": {
                "greedy": prefilter["score_greedy"],
                "sample": prefilter["score_sample"],
                "improvement": prefilter["improvement"],
                "rank": record["rank"],
            },
            "selection": {
                "madlad": {**madlad_keys, **record["source_meta"]["madlad"]},
                "teacher": {**teacher, "sampling_params": sampling(record)},
                "metricx": metricx,
                "filters": _filters(record["filters"]),
            },
        }
        check(row)
        return row

    return make


def sampling_maker(cfg: SynthConfig) -> Callable[[Record], dict[str, Any]]:
    """Return a function from a record to the sampling parameters of its three teacher requests.

    `candidate` of `final` is the chosen one; its seed is `seed + candidate`.
    """
    base = cfg.run.seed if cfg.teacher.generation.seed is None else cfg.teacher.generation.seed
    blocks = {kind: sampling_blocks(cfg, kind) for kind in ("sentence", "blob")}

    def sampling(record: Record) -> dict[str, Any]:
        blank = blocks[record["source_type"]]
        first = teacher_seed(base, record["source_id"], "prefilter")
        final = teacher_seed(base, record["source_id"], "final")
        return {
            "prefilter_greedy": {**blank["prefilter_greedy"], "seed": first},
            "prefilter_sample": {**blank["prefilter_sample"], "seed": first},
            "final": {**blank["final"], "seed": final, "candidate": record["best"]["index"]},
        }

    return sampling


def sampling_blocks(cfg: SynthConfig, kind: str) -> dict[str, Any]:
    """Return the parameters of the three requests for a kind of source, without seeds."""
    generation = cfg.teacher.generation

    def block(temperature: float, n: int = 1) -> dict[str, Any]:
        sampling = Sampling(
            max_tokens=generation.max_tokens_blob if kind == "blob" else generation.max_tokens,
            temperature=temperature,
            top_p=generation.top_p,
            seed=0,
        )
        parameters = {key: value for key, value in asdict(sampling).items() if value is not None}
        return {"n": n, **parameters, "stop": list(sampling.stop), "candidate": None}

    return {
        "prefilter_greedy": block(generation.greedy_temperature),
        "prefilter_sample": block(generation.sample_temperature),
        "final": block(generation.final_temperature, cfg.final_generation.num_candidates),
    }


def _filters(filters: dict[str, Any]) -> dict[str, Any]:
    """Return the filters with the same keys in each row, so that columns have one type."""
    judge = filters["judge"]
    outcome = "not_asked" if judge is None else "error" if "error" in judge else "pass"
    texts = {key: (judge or {}).get(key) or "" for key in ("reason_code", "notes", "error")}
    return {
        "passed": filters["passed"],
        "failed": filters["failed"],
        "judge": {"outcome": outcome, **texts},
        "tried": filters["tried"],
    }


def bare_url(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


@cache
def schema() -> dict[str, Any]:
    """Return the JSON schema of a row of train.jsonl: synth/export/export.schema.json."""
    path = Path(__file__).with_name("export.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def row_check() -> Callable[[Record], None]:
    """Return a function that raises ValueError for a row that does not fit the schema (a bug)."""
    validator = Draft202012Validator(schema())

    def check(row: Record) -> None:
        try:
            validator.validate(row)
        except ValidationError as error:
            location = ".".join(map(str, error.instance_path))
            raise ValueError(f"export: {location or 'row'}: {error.message[:300]}") from None

    return check


@cache
def arrow_schema() -> pyarrow.Schema:
    """Return the columns of train.parquet, derived from the JSON schema."""
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
    simple = {
        "string": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
    }
    return simple[name]


def pair_row(codes: dict[str, str], record: Record) -> Record | None:
    """Return the row of the chosen translation and the worst candidate; margin: score difference.

    Returns None if no other candidate has a worse score.
    """
    best, worst = record["best"], record["worst"]
    if worst is None or worst["text"] == best["text"] or worst["score"] <= best["score"]:
        return None
    return {
        **codes,
        "source_id": record["source_id"],
        "source_text": record["source_text"],
        "chosen": best["text"],
        "rejected": worst["text"],
        "metricx_qe_score_chosen": best["score"],
        "metricx_qe_score_rejected": worst["score"],
        "margin": worst["score"] - best["score"],
    }


def pair_schema() -> pyarrow.Schema:
    """Return the columns of pairs.parquet."""
    import pyarrow

    texts = (
        "pair_id",
        "source_lang_code",
        "target_lang_code",
        "source_id",
        "source_text",
        "chosen",
        "rejected",
    )
    numbers = ("metricx_qe_score_chosen", "metricx_qe_score_rejected", "margin")
    return pyarrow.schema(
        [(name, pyarrow.string()) for name in texts]
        + [(name, pyarrow.float64()) for name in numbers]
    )


def pair_codes(cfg: SynthConfig) -> dict[str, str]:
    """Return the pair's name and language tags, which every row has."""
    source, target = languages(cfg)
    return {
        "pair_id": f"{short_tag(source)}->{short_tag(target)}",
        "source_lang_code": source,
        "target_lang_code": target,
    }
