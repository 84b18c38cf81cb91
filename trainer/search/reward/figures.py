"""What the episodes of a step say of it, for the run's log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from trainer.search.records import GeneratedAnswer, JudgedAnswer, Status, Trajectory

PARTS = ("judge", "ndcg", "format")


def group_rewards(collected: Mapping[str, Trajectory]) -> dict[str, dict[str, float]]:
    """Group -> the rewards of its episodes that have one. Those that failed or are late have left
    it: a group may be smaller than it was sampled, or empty."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for id, trajectory in collected.items():
        of_group = groups[trajectory.group]
        if trajectory.reward is not None and trajectory.reward.value is not None:
            of_group[id] = trajectory.reward.value
    return dict(groups)


def step_figures(collected: Mapping[str, Trajectory]) -> dict[str, float]:
    """Those of the episodes and of their groups: how many were sampled, have lost an episode, and
    have too few left to be compared."""
    sampled, groups = Counter(t.group for t in collected.values()), group_rewards(collected)
    return reward_figures(list(collected.values())) | {
        "groups": len(groups),
        "groups_smaller": sum(len(of) < sampled[group] for group, of in groups.items()),
        # A group of one has nothing to be compared with.
        "groups_lost": sum(len(of) < min(2, sampled[group]) for group, of in groups.items()),
    }


def reward_figures(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Coverage beside every mean: of the episodes, and of each part of the reward (over those that
    have it); and what failed, by who it was."""
    rewards = [t.reward for t in episodes if t.reward is not None]
    statuses = Counter(reward.status for reward in rewards)
    found = {
        "reward_coverage": _share(statuses["ok"], len(episodes)),
        "reward_failed": statuses["failed"],
        "reward_late": statuses["late"],
        "reward_gated": sum(reward.gated for reward in rewards),
        "answers_failed": sum(_status(t.answer) == "failed" for t in episodes),
        "judgements_failed": sum(
            _status(t.answer) == "ok" and _status(t.judged) == "failed" for t in episodes
        ),
        "no_evidence": sum(_is_without_evidence(t) for t in episodes),
        "forced_share": _share(sum(t.forced for t in episodes), len(episodes)),
    }
    values = [reward.value for reward in rewards if reward.value is not None]
    found |= _mean("reward", values)
    for part in PARTS:
        had = [reward.parts[part] for reward in rewards if part in reward.parts]
        found |= {f"{part}_coverage": _share(len(had), len(episodes))} | _mean(part, had)
    return found


def _share(count: int, of: int) -> float:
    return count / of if of else 0.0


def _mean(name: str, values: list[float]) -> dict[str, float]:
    """No mean of nothing."""
    return {f"{name}_mean": fmean(values)} if values else {}


def _status(answer: GeneratedAnswer | JudgedAnswer | None) -> Status | None:
    return answer.status if answer else None


def _is_without_evidence(trajectory: Trajectory) -> bool:
    """Judged 0 without a call, though the search was not given up."""
    judged = trajectory.judged
    skipped = judged is not None and judged.status == "skipped" and judged.score == 0
    return skipped and trajectory.end != "declined"
