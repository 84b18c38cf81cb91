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

from bench.kit.xcomet_checkpoints import QE, REF
from services.xcomet.upstream import register_deberta
from tests.kits.comet import golden as comet_golden
from tests.kits.float64 import float64

#: Rows of one call; of any length, for upstream takes out its padding.
_BATCH = 7


def predicted(upstream: Any, name: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Scores of rows, and spans (start, end, severity, text, confidence) where the class has them.

    Upstream decides by the first of a batch whether there is a reference: rows of one form go
    together.
    """
    scores: list[Any] = [None] * len(rows)
    spans: list[Any] = [None] * len(rows)
    read = comet_golden.texts_read(name)
    for has_ref in (False, True):
        chosen = [k for k, row in enumerate(rows) if ("ref" in row) == has_ref]
        samples = [{n: t for n, t in rows[k].items() if n in read} for k in chosen]
        if not samples:
            continue
        said = upstream.predict(
            samples, batch_size=_BATCH, gpus=0, progress_bar=False, num_workers=0,
            length_batching=False,
        )  # fmt: skip
        # No other class has spans, and one of other labels than severities has no score of them.
        found = said.metadata.error_spans if getattr(upstream, "word_level", False) else None
        for place, k in enumerate(chosen):
            scores[k] = said.scores[place]
            spans[k] = found and [
                [s["start"], s["end"], s["severity"], s["text"], round(s["confidence"], 8)]
                for s in found[place]
            ]
    return {"scores": scores, "spans": spans if any(one is not None for one in spans) else None}


def passes_of(upstream: Any, row: dict[str, str]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of each pass of a sample, and the offsets of its translation."""
    passes = upstream.prepare_sample([row], stage="predict")
    return [one["input_ids"][0].tolist() for one in passes], passes[0]["mt_offsets"][0]


def labels_of(upstream: Any, rows: list[dict[str, str]]) -> list[str]:
    """The label of every position of the translation, with <s> and </s>: a digit for each."""
    found = []
    for row in rows:
        passes = upstream.prepare_sample([row], stage="predict")
        with torch.no_grad():
            logits = [upstream.forward(**one).logits.softmax(-1)[0] for one in passes]
        weights = [1.0] if len(passes) == 1 else upstream.input_weights_spans
        shortest = min(len(p) for p in logits)
        merged = sum(p[:shortest] * w for p, w in zip(logits, weights, strict=True))
        length = min(len(passes[0]["mt_offsets"][0]), shortest)
        found.append("".join(map(str, merged[:length].argmax(-1).tolist())))
    return found


def edges(upstream: Any, limit: int) -> list[str]:
    """The digests of the edge rows, read by a model of so many positions."""
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
    """What upstream says of a checkpoint."""
    import comet

    home = comet_golden.build(name, folder)
    before = Path.cwd()
    os.chdir(home)  # the demo's encoder is stored by a relative path
    try:
        upstream = comet.load_from_checkpoint("checkpoints/model.ckpt", local_files_only=True)
    finally:
        os.chdir(before)
    upstream = upstream.double()
    found = {
        "weights": comet_golden.digest(home),
        **predicted(upstream, name, comet_golden.rows(name)),
    }
    if name in comet_golden.XCOMET:
        found["labels"] = {"qe": labels_of(upstream, QE), "ref": labels_of(upstream, REF[::4])}
        found["ids"] = [
            comet_golden.row_digest(*passes_of(upstream, row)) for row in comet_golden.rows(name)
        ]
    if name == "xcomet_mix":
        found["edges"] = {str(limit): edges(upstream, limit) for limit in (512, 64)}
    return found


def main() -> None:
    """Write all files."""
    torch.set_num_threads(1)
    register_deberta()
    for name in (*comet_golden.CHECKPOINTS, "demo"):
        with tempfile.TemporaryDirectory() as folder, float64():
            found = predictions(name, Path(folder))
        file = comet_golden.GOLDEN / f"{name}.json"
        parts = (f'"{key}":{json.dumps(value, ensure_ascii=False)}' for key, value in found.items())
        file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
        print(file.relative_to(comet_golden.ROOT), len(found["scores"]), flush=True)


if __name__ == "__main__":
    main()
