"""An environment returns messages for the policy, and at the end a result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.search.records import Status, Trajectory
from trainer.search.rollout.prompt import Message


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of an episode.

    status: ok, or the reason why there is no reward: failed or late.
    reward: None unless ok, and never 0 in place of a failure.
    components: judge, ndcg and format before their weights; a missing one has no key.
    error: the reason of a missing reward.
    trajectory: the full record.
    """

    status: Status
    reward: float | None
    components: dict[str, float]
    error: str | None
    trajectory: Trajectory

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> EpisodeResult:
        """Return the result of an episode that has its reward."""
        reward = trajectory.reward
        assert reward is not None
        return cls(reward.status, reward.value, dict(reward.parts), reward.error, trajectory)

    def fields(self) -> dict[str, Any]:
        """Return the result as JSON values, with end and pages in place of the full record."""
        return {
            "reward": self.reward,
            "end": self.trajectory.end,
            "status": self.status,
            "components": self.components,
            "error": self.error,
            "pages": self.trajectory.shown_pages,
        }


@dataclass(frozen=True, slots=True)
class Observation:
    """The messages that are new for the policy; after the end there are none.

    done: the episode has ended.
    result: its result, if done.
    """

    messages: tuple[Message, ...] = field(default=())
    done: bool = False
    result: EpisodeResult | None = None
