"""How the records of a stage are spread: lengths, scores, improvements, as quantiles and bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from synth.config import SynthConfig
from synth.folder.store import Record, StageFolder

_BARS = 40
_BATCH = 1000


class Spread:
    """Values by how often they came; `step` bounds how many different ones are kept apart."""

    def __init__(self, step: float = 1.0) -> None:
        self._step = step
        self._counts: Counter[int] = Counter()
        self._total = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[round(value / self._step)] += 1
        self._total += value

    def as_dict(self) -> dict[str, Any] | None:
        """n, mean, quantiles (to the step), and bars: `counts[i]` from `edges[i]` on; None without
        a value."""
        if not self._counts:
            return None
        keys = sorted(self._counts)
        n = self._counts.total()
        edges, counts = self._bars(keys)
        return {
            "n": n,
            "mean": round(self._total / n, 4),
            **{f"p{q}": self._quantile(keys, q / 100) for q in (0, 1, 10, 50, 90, 99, 100)},
            "edges": edges,
            "counts": counts,
        }

    def _quantile(self, keys: list[int], share: float) -> float:
        left = max(1, math.ceil(share * self._counts.total()))
        for key in keys:
            left -= self._counts[key]
            if left <= 0:
                break
        return self._value(key)

    def _bars(self, keys: list[int]) -> tuple[list[float], list[int]]:
        width = max(1, math.ceil((keys[-1] - keys[0] + 1) / _BARS))
        counts = [0] * ((keys[-1] - keys[0]) // width + 1)
        for key in keys:
            counts[(key - keys[0]) // width] += self._counts[key]
        return [self._value(keys[0] + i * width) for i in range(len(counts) + 1)], counts

    def _value(self, key: int) -> float:
        return round(key * self._step, 6)


def distributions(cfg: SynthConfig, folder: StageFolder) -> dict[str, Any]:
    """The distributions of a stage's records, by name; read in one pass, in little memory."""
    reader = {
        "sample_sources": _of_sources,
        "prefilter_score": _of_improvement,
        "select_sources": _of_improvement,
        "score_select_best": _of_scores,
        "format_filter": _of_pairs,
    }.get(folder.name)
    if reader is None:
        return {}
    found = reader(cfg, folder.records())
    return {
        name: spread.as_dict() if isinstance(spread, Spread) else dict(sorted(spread.items()))
        for name, spread in found.items()
    }


_Found = dict[str, "Spread | Counter[str]"]


def _of_sources(cfg: SynthConfig, records: Iterable[Record]) -> _Found:
    chars, tokens = Spread(), Spread()
    buckets: Counter[str] = Counter()
    types: Counter[str] = Counter()
    strata: Counter[str] = Counter()
    edges = cfg.bucketing.boundaries
    for record in records:
        chars.add(len(record["source_text"]))
        tokens.add(record["length"])
        first = record["length_bucket_id"]
        buckets[f"{first}: from {edges[first]:g}"] += 1
        types[record["source_type"]] += 1
        strata[_stratum(record)] += 1
    return {
        "source_chars": chars,
        "source_tokens": tokens,
        "buckets": buckets,
        "source_types": types,
        "strata": strata,
    }


def _of_improvement(cfg: SynthConfig, records: Iterable[Record]) -> _Found:
    names = ("improvement", "score_greedy", "score_sample")
    found = {name: Spread(0.01) for name in names}
    strata: Counter[str] = Counter()
    for record in records:
        strata[_stratum(record)] += 1
        for name in names:
            found[name].add(record["prefilter"][name])
    return {**found, "strata": strata}


def _of_scores(cfg: SynthConfig, records: Iterable[Record]) -> _Found:
    best, worst, margin = (Spread(0.01) for _ in range(3))
    out: Counter[str] = Counter()
    strata: Counter[str] = Counter()
    for record in records:
        strata[_stratum(record)] += 1
        out.update(record["candidate_counts"]["out"])
        score = record["topk"][0]["score"]
        best.add(score)
        if record.get("worst") is not None:
            worst.add(record["worst"]["score"])
            margin.add(record["worst"]["score"] - score)
    return {
        "score_best": best,
        "score_worst": worst,
        "margin": margin,
        "candidates_out": out,
        "strata": strata,
    }


def _of_pairs(cfg: SynthConfig, records: Iterable[Record]) -> _Found:
    from synth.sources.measure import make_measure

    measure = make_measure(cfg.bucketing, cfg.data.tgt_lang)
    names = ("source_chars", "source_tokens", "target_chars", "target_tokens")
    found: dict[str, Spread] = {name: Spread() for name in names}
    score = Spread(0.01)
    judge: Counter[str] = Counter()
    rescued: Counter[str] = Counter()
    strata: Counter[str] = Counter()
    for batch in _batches(records):
        for record, tokens in zip(
            batch, measure([record["target_text"] for record in batch]), strict=True
        ):
            found["source_chars"].add(len(record["source_text"]))
            found["source_tokens"].add(record["length"])
            found["target_chars"].add(len(record["target_text"]))
            found["target_tokens"].add(tokens)
            score.add(record["best"]["score"])
            judge[_judged(record["filters"].get("judge"))] += 1
            strata[_stratum(record)] += 1
            if record["filters"]["tried"]:
                rescued[record["filters"]["tried"][0]["reason_code"]] += 1
    return {**found, "score_best": score, "judge": judge, "strata": strata, "rescued": rescued}


def _stratum(record: Record) -> str:
    """The type of a source and its length bucket: "sentence 3"."""
    return f"{record['source_type']} {record['length_bucket_id']}"


def _judged(verdict: dict[str, Any] | None) -> str:
    """Of a pair that was kept: a judge that failed stands apart from one that passed it."""
    if verdict is None:
        return "not asked"
    return f"error:{verdict['error']}" if "error" in verdict else "pass"


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    left = iter(records)
    while batch := list(islice(left, _BATCH)):
        yield batch
