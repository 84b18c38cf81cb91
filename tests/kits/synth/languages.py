"""Runs into one language or several: a corpus of two, a teacher with one sentence, a config."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synth.config import SynthConfig

#: For each tag: what the prompt calls it, a text in it, and one in its other variant (None where no
#: check tells them apart) with the code that rejects it.
#: The fake knows one sentence: what compares it with its source is left out.
OFF = ["too_short", "too_long", "length_ratio", "numbers_missing", "placeholders", "truncated"]


def answer(good: str, bad: str | None, share: float) -> Callable[[dict[str, Any], int | None], str]:
    """Return the good text or, for a share of the seeds, the bad one; with a number at its end."""

    def respond(body: dict[str, Any], seed: int | None) -> str:
        digest = hashlib.blake2b(f"{body['messages']}{seed}".encode()).digest()
        text = bad if bad and seed is not None and digest[0] < 256 * share else good
        return f"{text} {digest[1]}"

    return respond


def config(
    out_dir: Path, corpus: str, teacher: str, metricx: str, **sections: dict[str, Any]
) -> SynthConfig:
    base: dict[str, dict[str, Any]] = {
        "run": {"out_dir": str(out_dir), "shard_records": 4},
        "data": {
            "files": [corpus],
            "sample_pool_size": 12,
            "target_examples_total": 6,
            "src_lang": "en",
        },
        "bucketing": {"boundaries": [0, 30, 400]},
        "teacher": {"base_url": teacher, "model": "teacher", "wait_for_server_s": 0},
        "final_generation": {"num_candidates": 6, "store_top_k": 6, "blob": {"enabled": False}},
        "metricx": {"url": metricx, "checkpoint": "fake-metricx"},
        "filters": {
            "rules": {"off": OFF},
            "llm_judge": {"enabled": False},
            "on_reject": "next_best",
        },
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return SynthConfig.model_validate(base)
