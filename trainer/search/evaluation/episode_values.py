"""Compute the values of one episode: a stat is their mean, and policies are compared by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from trainer.search.records import Trajectory, Turn


def _part(name: str) -> Callable[[Trajectory], float | None]:
    return lambda t: t.reward.parts.get(name) if t.reward else None


def _actions(name: str) -> Callable[[Trajectory], float]:
    return lambda t: float(sum(turn.action == name for turn in own_turns(t)))


def _gold_seen(t: Trajectory) -> float | None:
    gold = t.question.gold
    return float(not set(gold).isdisjoint(t.shown_pages)) if gold else None


def _success(t: Trajectory) -> float | None:
    return None if t.success is None else float(t.success)


def _unfounded(t: Trajectory) -> float | None:
    return None if t.success is None else float(t.success and not t.answer_has_evidence)


def _tokens(t: Trajectory) -> float | None:
    tokens = [turn.tokens for turn in own_turns(t)]
    return None if None in tokens else float(sum(count for count in tokens if count is not None))


#: Stat -> the function of its value for an episode (None: no value). A share averages 0 and 1.
VALUES: Final[Mapping[str, Callable[[Trajectory], float | None]]] = {
    "reward_mean": lambda t: t.reward_value,
    "judge_mean": _part("judge"),
    "ndcg_mean": _part("ndcg"),
    "format_mean": _part("format"),
    "grounded_mean": lambda t: t.grounded.score if t.grounded else None,
    "success_share": _success,
    "success_without_evidence_share": _unfounded,
    "gold_seen_share": _gold_seen,
    "turns_mean": lambda t: float(len(own_turns(t))),
    "searches_mean": _actions("search"),
    "crops_mean": _actions("crop"),
    "invalid_mean": _actions("invalid"),
    "tokens_mean": _tokens,
    "forced_share": lambda t: float(t.forced),
    "declined_share": lambda t: float(t.end == "declined"),
    "context_share": lambda t: float(t.end == "context"),
    "failed_share": lambda t: float(t.end == "failed"),
}


def own_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that the policy wrote."""
    return [turn for turn in trajectory.turns if not turn.forced]


def values_of(trajectory: Trajectory) -> dict[str, float | None]:
    """Return all VALUES of an episode."""
    return {key: value_of(trajectory) for key, value_of in VALUES.items()}
