"""export/manifest.json: provenance that all rows share, and the digests of the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scorekit
from scorekit.files import write_atomic
from scorekit.prompts import load_template
from synth.config import SynthConfig
from synth.export.rows import bare_url, pair_codes, sampling_blocks
from synth.storage.stats import StageCounts
from synth.storage.store import StageFolder, read_json

#: Config keys about where a run is, which do not change its output.
PLACES: dict[str, Any] = {
    "run": {"out_dir", "log_level", "shard_records", "view_records", "answers", "prometheus_port"},
    "data": {"files", "pairs"},
    "teacher": {
        "base_url",
        "api_key_env",
        "request_timeout_s",
        "connect_timeout_s",
        "wait_for_server_s",
        "max_concurrency",
        "max_sequences",
        "requests_per_minute",
        "retry",
    },
    "metricx": {"url", "batch_size", "device", "cache_db"},
    "filters": {"llm_judge": {"url"}},
    "export": {"processes"},
}


def write_manifest(
    path: Path,
    cfg: SynthConfig,
    out_dirs: Sequence[Path],
    files: list[dict[str, Any]],
    counts: list[StageCounts],
    stage_digest: str,
    limit: int | None,
) -> None:
    """Write the shared provenance, counts and files; equal for equal runs.

    out_dirs: folders that may have the output of earlier stages.
    files: from `write_files`.
    counts: of the stages before the export.
    stage_digest: of the export.
    limit: largest number of rows.
    """
    blocks = {kind: sampling_blocks(cfg, kind) for kind in ("sentence", "blob")}
    for kind in blocks.values():
        for block in kind.values():
            del block["seed"], block["candidate"]  # these differ between rows
    content = {
        **pair_codes(cfg),
        "rows": row_counts(files),
        "partial": partial(out_dirs[0], counts, limit),
        "files": files,
        "teacher": {
            "backend": cfg.teacher.backend,
            "base_url": bare_url(cfg.teacher.base_url),
            "model": cfg.teacher.model,
            "revision": cfg.teacher.revision,
            "prompt": load_template(cfg.teacher.prompt),
            "sampling_params": blocks,
        },
        "services": {
            name: service
            for name in ("metricx", "judge")
            if (service := _service(out_dirs, name)) is not None
        },
        "corpus": corpus(out_dirs, counts[0].stage),
        "funnel": [
            {"stage": c.stage, "in": c.records_in, "out": c.records_out, "rejected": c.rejected}
            for c in counts
        ],
        "settings": settings(cfg),
        "code": {
            "scorekit": scorekit.__version__,
            "commit": scorekit.commit(),
        },
        "stage_digest": stage_digest,
    }
    write_atomic(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def row_counts(files: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of rows of "train", and of "pairs" if there are preference pairs."""
    counts: dict[str, dict[str, int]] = {}
    for file in files:
        kind = file["name"].partition(".")[2]  # each format has all rows
        by_kind = counts.setdefault(file["of"], {})
        by_kind[kind] = by_kind.get(kind, 0) + file["rows"]
    return {by_kind: max(kinds.values()) for by_kind, kinds in counts.items()}


def settings(cfg: SynthConfig) -> dict[str, Any]:
    """Return the config without keys about locations."""
    return cfg.model_dump(mode="json", exclude=PLACES)


def partial(out_dir: Path, counts: list[StageCounts], limit: int | None) -> bool:
    """Return True if a stage took only a part of its records: --limit, or a dry run."""
    manifests = (StageFolder(out_dir, stage_counts.stage).manifest() for stage_counts in counts)
    return limit is not None or any(m is not None and m.get("limit") for m in manifests)


def corpus(out_dirs: Sequence[Path], first_stage: str) -> dict[str, Any]:
    """Return the summary of the corpus, by the first stage."""
    for folder in out_dirs:
        counts = read_json(StageFolder(folder, first_stage).path / "counts.json")
        if counts is not None:
            files = counts.pop("files", [])
            return {**counts, "files": len(files)}
    return {}


def _service(out_dirs: Sequence[Path], name: str) -> dict[str, Any] | None:
    """Return a service's info without its address and start time."""
    for folder in out_dirs:
        if (info := read_json(folder / f"service-{name}.json")) is not None:
            keys = (
                "service",
                "model",
                "revision",
                "tokenizer",
                "dtype",
                "max_input_length",
                "commit",
                "versions",
            )
            return {key: info.get(key) for key in keys}
    return None
