"""Recompute `comet/*.json` in float64 by unbabel-comet itself; no test runs this.

.venv-oracle/bin/python -m tests.golden.recompute_comet
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from services.xcomet.upstream import register_deberta
from testing.checkpoints.xcomet import QE, REF
from tests.kits.comet import golden as comet_golden
from tests.kits.float64 import float64

#: Rows of one call; of any length, because upstream removes its padding.
_BATCH = 7


def predicted(upstream: Any, name: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Return the scores of rows, and spans (start, end, severity, text, confidence) if the class
    has them.

    Upstream decides by the first row of a batch whether there is a reference, so a call has rows
    of one form."""
    scores: list[Any] = [None] * len(rows)
    spans: list[Any] = [None] * len(rows)
    read = comet_golden.texts_read(name)
    for has_ref in (False, True):
        chosen = [k for k, row in enumerate(rows) if ("ref" in row) == has_ref]
        samples = [{n: t for n, t in rows[k].items() if n in read} for k in chosen]
        if not samples:
            continue
        prediction = upstream.predict(
            samples, batch_size=_BATCH, gpus=0, progress_bar=False, num_workers=0,
            length_batching=False,
        )  # fmt: skip
        # No other class has spans; a class with labels other than severities has no span score.
        error_spans = (
            prediction.metadata.error_spans if getattr(upstream, "word_level", False) else None
        )
        for index, k in enumerate(chosen):
            scores[k] = prediction.scores[index]
            spans[k] = error_spans and [
                [s["start"], s["end"], s["severity"], s["text"], round(s["confidence"], 8)]
                for s in error_spans[index]
            ]
    return {
        "scores": scores,
        "spans": spans if any(row_spans is not None for row_spans in spans) else None,
    }


def passes_of(upstream: Any, row: dict[str, str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each pass of a sample, and the offsets of its translation."""
    passes = upstream.prepare_sample([row], stage="predict")
    return [encoded["input_ids"][0].tolist() for encoded in passes], passes[0]["mt_offsets"][0]


def labels_of(upstream: Any, rows: list[dict[str, str]]) -> list[str]:
    """Return the label of every position of the translation, with <s> and </s>: a digit for
    each."""
    labels = []
    for row in rows:
        passes = upstream.prepare_sample([row], stage="predict")
        with torch.no_grad():
            logits = [upstream.forward(**encoded).logits.softmax(-1)[0] for encoded in passes]
        weights = [1.0] if len(passes) == 1 else upstream.input_weights_spans
        shortest = min(len(p) for p in logits)
        merged = sum(p[:shortest] * w for p, w in zip(logits, weights, strict=True))
        length = min(len(passes[0]["mt_offsets"][0]), shortest)
        labels.append("".join(map(str, merged[:length].argmax(-1).tolist())))
    return labels


def edges(upstream: Any, limit: int) -> list[str]:
    """Return the digests of the edge rows, read by a model of so many positions."""
    kind = type(upstream.encoder)
    positions = kind.max_positions
    kind.max_positions = property(lambda encoder: limit)
    try:
        return [
            comet_golden.row_digest(*passes_of(upstream, row))
            for row in comet_golden.edge_rows(limit)
        ]
    finally:
        kind.max_positions = positions


def predictions(name: str, folder: Path) -> dict[str, Any]:
    """Return upstream's predictions for a checkpoint."""
    import comet

    home = comet_golden.build(name, folder)
    before = Path.cwd()
    os.chdir(home)  # the demo's encoder is stored by a relative path
    try:
        upstream = comet.load_from_checkpoint("checkpoints/model.ckpt", local_files_only=True)
    finally:
        os.chdir(before)
    upstream = upstream.double()
    golden = {
        "weights": comet_golden.digest(home),
        **predicted(upstream, name, comet_golden.rows(name)),
    }
    if name in comet_golden.XCOMET:
        golden["labels"] = {"qe": labels_of(upstream, QE), "ref": labels_of(upstream, REF[::4])}
        golden["ids"] = [
            comet_golden.row_digest(*passes_of(upstream, row)) for row in comet_golden.rows(name)
        ]
    if name == "xcomet_mix":
        golden["edges"] = {str(limit): edges(upstream, limit) for limit in (512, 64)}
    return golden


def main() -> None:
    """Write all files."""
    torch.set_num_threads(1)
    register_deberta()
    for name in (*comet_golden.CHECKPOINTS, "demo"):
        with tempfile.TemporaryDirectory() as folder, float64():
            golden = predictions(name, Path(folder))
        file = comet_golden.GOLDEN / f"{name}.json"
        parts = (
            f'"{key}":{json.dumps(value, ensure_ascii=False)}' for key, value in golden.items()
        )
        file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
        print(file.relative_to(comet_golden.ROOT), len(golden["scores"]), flush=True)


if __name__ == "__main__":
    main()
