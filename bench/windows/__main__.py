"""Spans and scores of windows against those of the whole text, where the whole still fits.

    python -m bench.windows

Runs of neighbouring TED segments (tests/data/prose, whose translations no annotator marked) are
joined to documents that fit the demo's xCOMET (512 tokens). Each is scored whole; in windows of at
most 256 tokens; cut at 256; and, for the model's own noise of context, whole with the next segment
added, and without its last. Spans are compared by characters of `mt`: F1 of those that both have
(of severity nothing), and the errors within 20 characters of a window's border by themselves. In
half of the documents words of another segment are put next to a border, so that there is an error.
Then, without a model: the share of borders of an alignment that lie in one pair of segments, of
documents that lack some translations or in which some are joined to the next.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scorekit.command import run_command
from scorekit.schemas import Scored
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.text.alignment import align

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results/windows.json"
#: File, languages, and what stands between two sentences of the source.
CORPORA = (
    ("ted_en_de", "en", "de", " "),
    ("ted_zh_en", "zh", "en", ""),
    ("ko_en", "en", "ko", " "),
)
DOCUMENTS = 12
LIMIT, WINDOW = 512, 256
NEAR = 20
Pair = tuple[str, str]


def pairs(name: str, left: str, right: str) -> list[Pair]:
    """Segments in their order, one translation each."""
    lines = (ROOT / f"tests/data/prose/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return list({row[left].strip(): row[right].strip() for row in rows}.items())


def joined(run: Sequence[Pair], joint: str) -> SampleForScoring:
    """A document."""
    src, mt = zip(*run, strict=True)
    return SampleForScoring(joint.join(src), " ".join(mt))


def marked(result: Scored, end: int) -> set[int]:
    """Characters of `mt` before `end` that lie in a span."""
    return {at for s in result.error_spans or () for at in range(s.start, min(s.end, end))}


def f1(ours: set[int], theirs: set[int]) -> float:
    """1 where both are empty."""
    both = len(ours) + len(theirs)
    return 2 * len(ours & theirs) / both if both else 1.0


def documents(found: list[Pair], joint: str, scorer: Any) -> Iterable[tuple[list[Pair], Pair]]:
    """Runs that just fit the model with a segment more, and that segment."""
    rng = random.Random(0)
    strict = ScoringConfig(overlong="error", max_input_length=LIMIT)
    for k in range(DOCUMENTS):
        at = rng.randrange(len(found) - 30)
        count = 3
        while count < 28:
            sample = joined(found[at : at + count + 2], joint)
            if scorer.score_batch([sample], strict).sequence_scores[0] is None:
                break
            count += 1
        run = found[at : at + count]
        if k % 2:  # an error at a border that windows may take: words of a far segment
            middle = count // 2
            src, mt = run[middle]
            other = found[(at + 60) % len(found)][1].split()[:3]
            run[middle] = (src, " ".join([*other, mt]))
        yield run, found[at + count]


def compare(scorer: Any, name: str, left: str, right: str, joint: str) -> dict[str, Any]:
    """Figures of a corpus: against the whole text, of windows, of context noise, of truncation."""
    rows: dict[str, list[dict[str, float]]] = {}
    counts: list[int] = []
    for run, following in documents(pairs(name, left, right), joint, scorer):
        sample = joined(run, joint)
        whole = _one(scorer, sample, LIMIT, "truncate")
        windows = _one(scorer, sample, WINDOW, "windows")
        counts.append(len(windows.windows or [0]))
        edges = [w.mt_start for w in (windows.windows or [])[1:]]
        others = {
            "windows": windows,
            "truncated": _one(scorer, sample, WINDOW, "truncate"),
            "one segment more": _one(scorer, joined([*run, following], joint), LIMIT, "truncate"),
            "one segment fewer": _one(scorer, joined(run[:-1], joint), LIMIT, "truncate"),
        }
        for kind, other in others.items():
            end = len(joined(run[:-1], joint).mt) if kind.endswith("fewer") else len(sample.mt)
            ours, theirs = marked(other, end), marked(whole, end)
            row = {"f1": f1(ours, theirs), "score": abs(other.score - whole.score)}
            near = {at for edge in edges for at in range(edge - NEAR, edge + NEAR)}
            row["f1_at_borders"] = f1(ours & near, theirs & near)
            row["share_marked"] = len(ours) / end
            rows.setdefault(kind, []).append(row)
    means = {
        kind: {key: round(statistics.fmean(r[key] for r in found), 4) for key in found[0]}
        for kind, found in rows.items()
    }
    return {"documents": len(counts), "windows_a_document": statistics.fmean(counts), **means}


def _one(scorer: Any, sample: SampleForScoring, limit: int, overlong: Any) -> Scored:
    cfg = ScoringConfig(overlong=overlong, max_input_length=limit)
    (result,) = scorer.score_batch([sample], cfg).metadata
    assert isinstance(result, Scored), result
    return result


def aligned(
    found: list[Pair], joint: str, lacks: float, merged: float, tail: float
) -> dict[str, float]:
    """Of documents of 40 segments: the share of borders in one pair of segments on both sides, and
    the share of true borders that were found."""
    rng = random.Random(0)
    right_ones = borders = hit = true_ones = 0
    for _ in range(60):
        at = rng.randrange(len(found) - 40)
        left = right = ""
        true = [(0, 0)]
        for k, (src, mt) in enumerate(found[at : at + 40]):
            left += src + joint
            chance = rng.random()
            if k < 40 * (1 - tail) and chance >= lacks:
                right += mt.rstrip(".。!?！？") + ", " if chance < lacks + merged else mt + " "
            true.append((len(left), len(right)))
        got = align(left, right)[1:-1]
        borders += len(got)
        right_ones += sum(
            any(a <= x <= b and c <= y <= d for (a, c), (b, d) in pairwise(true)) for x, y in got
        )
        inner = {pair for pair in true if pair[0] < len(left) and pair[1] < len(right)} - {(0, 0)}
        hit += len(inner & set(got))
        true_ones += len(inner)
    return {"precision": round(right_ones / borders, 4), "recall": round(hit / true_ones, 4)}


def main() -> None:
    """Measure, print and write."""
    from services.xcomet.model import XCometXLScorer

    told: dict[str, Any] = {"alignment": {}, "spans": {}}
    for name, left, right, joint in CORPORA:
        found = pairs(name, left, right)
        told["alignment"][name] = {
            f"lacking {lacks}, joined {merged}, tail {tail}": aligned(
                found, joint, lacks, merged, tail
            )
            for lacks, merged, tail in ((0, 0, 0), (0.05, 0.1, 0), (0.1, 0.2, 0), (0, 0, 0.3))
        }
    scorer = XCometXLScorer(str(ROOT / "demo/models/xcomet"), device="cpu")
    for corpus in CORPORA:
        told["spans"][corpus[0]] = compare(scorer, *corpus)
    RESULTS.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
