"""Reads the pairs of source and translation that load tests and benchmarks send."""

from __future__ import annotations

import json
from pathlib import Path

from scorekit.scorers import SampleForScoring

ROOT = Path(__file__).parents[1]


def read_pairs(count: int) -> list[SampleForScoring]:
    """Return real sources with translations: the demo's held-out and prompt sets, in file
    order.
    """
    pairs = []
    for name in ("heldout", "rl_prompts"):
        for line in (ROOT / f"demo/data/{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            pairs.append(SampleForScoring(row["src_text"], row["ref_text"]))
    return pairs[:count]
