"""From what is known of an episode to the number that the policy is trained on. Pure functions."""

from __future__ import annotations

from trainer.search.records import EpisodeReward, GeneratedAnswer, JudgedAnswer, Trajectory
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.ndcg import ndcg
from trainer.search.reward.wellformed import format_fault

NO_GOLD = "the question names no gold page"


def unasked(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory | None:
    """The episode with its answer skipped, where its reward is known, or cannot be had, without
    one: nothing is to be paid for it. None: generator and judge are to be asked.

    Who gave the search up (`declined`) has no answer that could be judged: its score is 0, where
    others are judged.
    """
    why = _why_unasked(trajectory, cfg)
    if why is None:
        return None
    given_up = trajectory.end == "declined" and cfg.weights["judge"] > 0
    return trajectory.model_copy(
        update={
            "answer": GeneratedAnswer(status="skipped", error=why),
            "judged": JudgedAnswer(status="skipped", score=0.0 if given_up else None, reason=why),
        }
    )


def rewarded(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory:
    """The episode with its NDCG and reward.

    reward = w_judge * score + w_ndcg * NDCG + w_format * format, where format is 1 or 0; a gate
    makes it 0 where format is 0. A part with a weight that could not be had makes it no number:
    failed, or late; never 0. An end that the policy did not choose is scored as any other, or earns
    0, or less by a penalty.
    """
    value = ndcg(trajectory.shown_pages, trajectory.question, cfg.ndcg_gold)
    return trajectory.model_copy(update={"ndcg": value, "reward": _reward(trajectory, value, cfg)})


def _why_unasked(trajectory: Trajectory, cfg: SearchRewardConfig) -> str | None:
    if trajectory.end == "failed":
        return trajectory.end_detail or "the episode failed"
    if trajectory.end == "declined":
        return "the search was given up"
    if not cfg.weights["judge"]:
        return "the judge has no weight"
    if cfg.gate and (fault := format_fault(trajectory)):
        return f"not well-formed: {fault}"
    if _is_forced(trajectory) and cfg.forced_completion == "zero":
        return "its end was forced"
    if cfg.weights["ndcg"] and not trajectory.question.gold:
        return NO_GOLD
    return None


def _reward(trajectory: Trajectory, found: float | None, cfg: SearchRewardConfig) -> EpisodeReward:
    if trajectory.end in (None, "failed"):
        return EpisodeReward(status="failed", error=trajectory.end_detail or "it has no end")
    fault, judged = format_fault(trajectory), trajectory.judged
    parts = {"format": 0.0 if fault else 1.0}
    if found is not None:
        parts["ndcg"] = found
    if judged is not None and judged.score is not None:
        parts["judge"] = judged.score
    gated, forced = bool(cfg.gate and fault), _is_forced(trajectory)
    if gated or (forced and cfg.forced_completion == "zero"):
        return EpisodeReward(status="ok", value=0.0, parts=parts, gated=gated)
    weights = {part: weight for part, weight in cfg.weights.items() if weight}
    if weights.keys() - parts:
        return _not_had(trajectory, parts)
    value = sum(weight * parts[part] for part, weight in weights.items())
    if forced and cfg.forced_completion == "penalty":
        value -= cfg.forced_penalty
    return EpisodeReward(status="ok", value=value, parts=parts)


def _not_had(trajectory: Trajectory, parts: dict[str, float]) -> EpisodeReward:
    """No number, and why. What became of the answer says more than that it was not judged."""
    answer, judged = trajectory.answer, trajectory.judged
    late = "late" in (answer and answer.status, judged and judged.status)
    why = _told(answer) or _told(judged) or "it was not judged"
    return EpisodeReward(status="late" if late else "failed", error=why, parts=parts)


def _told(said: GeneratedAnswer | JudgedAnswer | None) -> str | None:
    """Why there is nothing of it; and who failed, where one was asked (its model is known)."""
    if said is None:
        return None
    if isinstance(said, GeneratedAnswer):
        who, why = "generator", said.error
    else:
        who, why = "judge", said.reason
    return f"{who}: {why}" if why and said.model and said.status == "failed" else why


def _is_forced(trajectory: Trajectory) -> bool:
    """Whether the policy did not choose the end: its turns, or its context, were used up."""
    return trajectory.end in ("forced", "context")
