"""Compute the reward stats of a step for the run's log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from trainer.search.records import GeneratedAnswer, JudgedAnswer, Status, Trajectory

PARTS = ("judge", "ndcg", "format")


def group_rewards(collected: Mapping[str, Trajectory]) -> dict[str, dict[str, float]]:
    """Return the rewards of each group by trajectory id.

    Failed and late episodes are not in their group, which may be smaller than sampled, or empty.
    """
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for id, trajectory in collected.items():
        of_group = groups[trajectory.group]
        if trajectory.reward_value is not None:
            of_group[id] = trajectory.reward_value
    return dict(groups)


def without_spread(final: Mapping[str, Trajectory]) -> set[str]:
    """Return the groups with equal rewards or with fewer than two rewards: they teach nothing."""
    return {
        group for group, rewards in group_rewards(final).items() if len(set(rewards.values())) < 2
    }


def step_stats(collected: Mapping[str, Trajectory]) -> dict[str, float]:
    """Return the stats of episodes and groups.

    Groups: how many were sampled, miss an episode, or are too small for a comparison.
    """
    sampled, groups = Counter(t.group for t in collected.values()), group_rewards(collected)
    return reward_stats(list(collected.values())) | {
        "groups": len(groups),
        "groups_smaller": sum(len(rewards) < sampled[group] for group, rewards in groups.items()),
        # A group sampled with one episode never has a comparison.
        "groups_lost": sum(
            len(rewards) < min(2, sampled[group]) for group, rewards in groups.items()
        ),
    }


def reward_stats(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return means and coverages of the reward and its components, and counts of failures."""
    rewards = [t.reward for t in episodes if t.reward is not None]
    statuses = Counter(reward.status for reward in rewards)
    stats = {
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
    stats |= _mean("reward", values)
    for part in PARTS:
        values_of_part = [reward.parts[part] for reward in rewards if part in reward.parts]
        stats |= {f"{part}_coverage": _share(len(values_of_part), len(episodes))} | _mean(
            part, values_of_part
        )
    return stats


def answer_stats(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return what became of the answers and verdicts of episodes, as `answers/OUTCOME`.

    Of answers: ok, failed, late, no_evidence (scored 0 without a call), not_answered (given up, or
    the reward does not need one); cached: those of ok that were known before, at no cost. Of
    verdicts on answers: judged_ok, judged_failed, judged_skipped, judged_late.
    """
    counts: Counter[str] = Counter()
    for trajectory in episodes:
        answer, judged = trajectory.answer, trajectory.judged
        if answer is None:
            continue
        if answer.status == "skipped":
            counts["no_evidence" if _is_without_evidence(trajectory) else "not_answered"] += 1
        else:
            counts[answer.status] += 1
            counts["cached"] += answer.charge.cached
        if answer.status == "ok" and judged is not None:
            counts[f"judged_{judged.status}"] += 1
    return {f"answers/{outcome}": float(count) for outcome, count in sorted(counts.items())}


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _mean(name: str, values: list[float]) -> dict[str, float]:
    """Return the mean; nothing for an empty list."""
    return {f"{name}_mean": fmean(values)} if values else {}


def _status(answer: GeneratedAnswer | JudgedAnswer | None) -> Status | None:
    return answer.status if answer else None


def _is_without_evidence(trajectory: Trajectory) -> bool:
    """Return whether an episode scored 0 without a call and was not given up."""
    judged = trajectory.judged
    skipped = judged is not None and judged.status == "skipped" and judged.score == 0
    return skipped and trajectory.end != "declined"
