"""Compute the reward of an episode from its answer, verdict and pages (NDCG). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from trainer.search.config import GoldUnit, SearchRewardConfig
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Trajectory,
)

NO_GOLD = "the question names no gold page"


def skip_reward(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory | None:
    """Return the episode with a skipped answer if its reward does not depend on one.

    None: generator and judge are needed. An episode that gave up (`declined`) has no answer to
    judge; if the judge has a weight its score is 0.
    """
    reason = _skip_reason(trajectory, cfg)
    if reason is None:
        return None
    given_up = trajectory.end == "declined" and cfg.weights["judge"] > 0
    return trajectory.model_copy(
        update={
            "answer": GeneratedAnswer(status="skipped", error=reason),
            "judged": JudgedAnswer(
                status="skipped", score=0.0 if given_up else None, reason=reason
            ),
        }
    )


def with_reward(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory:
    """Return the episode with its NDCG and reward.

    reward = w_judge * score + w_ndcg * NDCG + w_format * format, where format is 1 or 0; a gate
    makes it 0 if format is 0. If a component with a weight is missing, there is no value: the
    status is failed or late, never 0. A forced end gets 0 or a penalty, or is
    scored as any other (`forced_completion`).
    """
    value = ndcg(trajectory.shown_pages, trajectory.question, cfg.ndcg_gold)
    return trajectory.model_copy(update={"ndcg": value, "reward": _reward(trajectory, value, cfg)})


def ndcg(
    pages_in_order: Sequence[str], question: Question, gold: GoldUnit = "page"
) -> float | None:
    """Return the normalized discounted cumulative gain of visible pages in their order.

    None for a question without a gold page. Gain is binary, the discount log2(rank + 1) (Burges et
    al., 2005), without a cut-off. The rank is that among the visible pages, not that of the search
    engine; a repeated page counts at its first rank. The ideal has a gold page at each rank.

    A gold page counts once, and a page counts for one gold page, so the value is at most 1 even if
    several pages match a gold page or one page matches several. The best pairing counts.
    """
    pages = list(dict.fromkeys(pages_in_order))
    if gold == "document":
        keys = [_document(page) for page in pages]
        golds = [{document} for document in dict.fromkeys(map(_document, question.gold))]
    else:
        alternatives = question.alternatives if gold == "alternatives" else {}
        keys = pages
        golds = [{page, *alternatives.get(page, ())} for page in dict.fromkeys(question.gold)]
    if not golds:
        return None
    paired: dict[int, str] = {}
    # Pairing greedily by rank gives the greatest sum: the sets of pages that can be paired are
    # a matroid.
    gain = sum(
        _discount(rank) for rank, page in enumerate(keys, 1) if _pair(page, golds, paired, set())
    )
    return gain / sum(_discount(rank) for rank in range(1, len(golds) + 1))


def format_error(trajectory: Trajectory) -> str | None:
    """Return the first format error of an episode as `turn N: reason`, or None.

    Every turn that the policy wrote counts: an invalid action (a wrong form, or a box outside the
    image) is an error. A forced turn or a forced end is not.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced]
    if not turns:
        return "no turn"
    for turn in turns:
        if turn.action == "invalid":
            return f"turn {turn.number}: {turn.reason}"
        if turn.action == "complete" and turn is not turns[-1]:
            return f"turn {turn.number}: the episode went on behind its end"
    return None


def _skip_reason(trajectory: Trajectory, cfg: SearchRewardConfig) -> str | None:
    if trajectory.end == "failed":
        return trajectory.end_detail or "the episode failed"
    if trajectory.end == "declined":
        return "the search was given up"
    if not cfg.weights["judge"]:
        return "the judge has no weight"
    if cfg.gate and (error := format_error(trajectory)):
        return f"not well-formed: {error}"
    if _is_forced(trajectory) and cfg.forced_completion == "zero":
        return "its end was forced"
    if cfg.weights["ndcg"] and not trajectory.question.gold:
        return NO_GOLD
    return None


def _reward(
    trajectory: Trajectory, ndcg_value: float | None, cfg: SearchRewardConfig
) -> EpisodeReward:
    if trajectory.end in (None, "failed"):
        return EpisodeReward(status="failed", error=trajectory.end_detail or "it has no end")
    form_reason, judged = format_error(trajectory), trajectory.judged
    parts = {"format": 0.0 if form_reason else 1.0}
    if ndcg_value is not None:
        parts["ndcg"] = ndcg_value
    if judged is not None and judged.score is not None:
        parts["judge"] = judged.score
    gated, forced = bool(cfg.gate and form_reason), _is_forced(trajectory)
    if gated or (forced and cfg.forced_completion == "zero"):
        return EpisodeReward(status="ok", value=0.0, parts=parts, gated=gated)
    weights = {part: weight for part, weight in cfg.weights.items() if weight}
    if weights.keys() - parts:
        return _missing_reward(trajectory, parts)
    value = sum(weight * parts[part] for part, weight in weights.items())
    if forced and cfg.forced_completion == "penalty":
        value -= cfg.forced_penalty
    return EpisodeReward(status="ok", value=value, parts=parts)


def _missing_reward(trajectory: Trajectory, parts: dict[str, float]) -> EpisodeReward:
    """Return a reward without a value and its reason, if possible that of the answer."""
    answer, judged = trajectory.answer, trajectory.judged
    late = "late" in (answer and answer.status, judged and judged.status)
    reason = _status_reason(answer) or _status_reason(judged) or "it was not judged"
    return EpisodeReward(status="late" if late else "failed", error=reason, parts=parts)


def _status_reason(part: GeneratedAnswer | JudgedAnswer | None) -> str | None:
    """Return the reason of a missing part; with the service's name if one failed."""
    if part is None:
        return None
    if isinstance(part, GeneratedAnswer):
        service, reason = "generator", part.error
    else:
        service, reason = "judge", part.reason
    return f"{service}: {reason}" if reason and part.model and part.status == "failed" else reason


def _is_forced(trajectory: Trajectory) -> bool:
    """Return whether turns or context were used up, so the policy did not choose the end."""
    return trajectory.end in ("forced", "context")


def _pair(page: str, golds: Sequence[set[str]], paired: dict[int, str], tried: set[int]) -> bool:
    """Pair a page with a gold page and return whether that is possible.

    Pages that are paired already may move to other gold pages (Kuhn's augmenting path).
    """
    for index, pages in enumerate(golds):
        if page in pages and index not in tried:
            tried.add(index)
            if index not in paired or _pair(paired[index], golds, paired, tried):
                paired[index] = page
                return True
    return False


def _discount(rank: int) -> float:
    return 1 / log2(rank + 1)


def _document(page_id: str) -> str:
    """Return the document of a page id, which is the file's stem, `_`, the page number."""
    return page_id.rpartition("_")[0]
