"""Outputs of `scorekit score`, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIELDS = {"src": "src", "mt": "mt", "ref": "ref", "id": "id"}


def scored(score: float, **fields: Any) -> dict[str, Any]:
    """Return a result with a score."""
    truncated = dict.fromkeys(("src", "mt", "ref"), False)
    return {"ok": True, "score": score, "tokens": 9, "truncated": truncated, **fields}


def failed(type: str = "non_finite") -> dict[str, Any]:
    """Return a result without one."""
    return {"ok": False, "error": {"type": type, "message": "it has none", "retryable": False}}


def span(start: int, end: int, severity: str = "MAJOR") -> dict[str, Any]:
    """Return an error span."""
    return {"start": start, "end": end, "severity": severity, "confidence": 0.5}


def write_single(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    *,
    ids: Sequence[Any] | None = None,
    service: str = "xcomet",
    input: str = "",
    **described: Any,
) -> Path:
    """Write an output of `--url`, with its description.

    described: of the model.
    """
    lines = [
        {"line": number, "id": None if ids is None else ids[number - 1], **result}
        for number, result in enumerate(results, 1)
    ]
    model = {"service": service, "model": "m", "revision": "1", "dtype": "float32", **described}
    meta = {"input": input, "format": "jsonl", "fields": FIELDS, "options": {}, "model": model}
    return _write(path, lines, meta)


def write_several(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write an output of `--metric metricx=... --metric xcomet=...`, with its description.

    rows: kept fields and the results of both metrics.
    """
    lines = [{"line": number, **row} for number, row in enumerate(rows, 1)]
    metrics = {
        name: {"service": name, "model": name, "revision": "1", "dtype": "float32", "task": None}
        | {"higher_is_better": name == "xcomet", "options": {}}
        for name in ("metricx", "xcomet")
    }
    keep = ["src", "mt", "ref", "system"]
    meta = {"input": "", "format": "jsonl", "fields": FIELDS, "keep": keep, "metrics": metrics}
    return _write(path, lines, meta)


def _write(path: Path, lines: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    path.with_name(f"{path.name}.meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return path
