"""Computes the figures of a run from its episodes and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.runs.stats import mean_of

Line = Mapping[str, Any]
SMALL_PRINT = "small print"
#: Figure -> value of an episode, by `trainer/search/evaluation/stats.py`.
MEANS = {
    "ndcg": "ndcg_mean",
    "gold_seen": "gold_seen_share",
    "without_evidence": "success_without_evidence_share",
    "turns": "turns_mean",
    "searches": "searches_mean",
    "crops": "crops_mean",
    "invalid": "invalid_mean",
    "forced": "forced_share",
}
#: Of a line of the log: what training saw of its own samples.
LOGGED = (
    "reward_mean",
    "judge_mean",
    "ndcg_mean",
    "turns_mean",
    "tokens_mean",
    "crops_mean",
    "invalid_mean",
    "forced_share",
    "entropy_est",
    "approx_kl",
    "clip_frac",
    "grad_norm",
    "A_norm_std",
    "groups_without_spread",
)


def stats_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of a measurement.

    right: the share that the judge accepts of those that were judged; coverage: the share that was
    judged. An episode whose judgement failed counts in neither as wrong.
    of_questions: a letter for each question: 1 right, 0 wrong, - not judged.
    """

    def mean(key: str, rows: Sequence[Line]) -> float | None:
        return mean_of([row[key] for row in rows if row[key] is not None])

    rights = [line["success_share"] for line in lines]
    letters = ["-" if right is None else str(int(right)) for right in rights]
    reasons = Counter(reason for line in lines for reason in line["reasons"])
    return {
        "questions": len(lines),
        "right": mean("success_share", lines),
        "small_print": mean("success_share", [li for li in lines if li["type"] == SMALL_PRINT]),
        "coverage": mean_of([float(right is not None) for right in rights]),
        **{name: mean(key, lines) for name, key in MEANS.items()},
        "own_ends": mean_of([float(line["end"] == "complete") for line in lines]),
        "invalid_by_reason": dict(reasons.most_common()),
        "of_questions": "".join(letters),
    }


def curves(log: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return the logged figures by update."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(float(value), 4)

    return {key: [rounded(line.get(key)) for line in log] for key in LOGGED}
