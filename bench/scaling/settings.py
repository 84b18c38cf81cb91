"""Settings and results of a simulated run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Sampler servers.

    servers: their number.
    max_requests: requests that a server runs together; the others wait in order.
    step_s: seconds of a decoding step with one request.
    step_s_per_request: additional seconds of it for each further request.
    prefill_s_per_token: seconds for a prompt token that is not cached. Decoding waits meanwhile.
    overhead_s: seconds of a request besides these, such as its way over the network. They do not
    occupy the server.
    prefix_affinity: the turns of an episode go to the same server, which has cached the earlier
    ones. Otherwise they go to the server with the fewest requests.
    """

    servers: int = 1
    max_requests: int = 256
    step_s: float = 0.01
    step_s_per_request: float = 0.0
    prefill_s_per_token: float = 0.0
    overhead_s: float = 0.0
    prefix_affinity: bool = True


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """A service: the seconds of a call, and how many calls it answers together."""

    name: str
    latency_s: float
    parallel: int = 1_000_000


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The learner.

    s_per_update, s_per_sequence, s_per_token: seconds of an update are their sum.
    write_s: seconds to write the weights, while the samplers continue.
    load_s: seconds in which the samplers load them and generate nothing.
    """

    s_per_update: float = 0.0
    s_per_sequence: float = 0.0
    s_per_token: float = 0.0
    write_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Tokens that the policy generates in a turn, and those that the tools add after it."""

    completion_tokens: int
    observation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """An episode as it will run.

    prompt_tokens: of the first turn.
    """

    prompt_tokens: int
    turns: tuple[PlannedTurn, ...]


#: Whether batches of different updates are collected at the same time.
Batches = Literal["ordered", "overlapping"]
#: Returns the episode of an update (from 1) at a position (from 0).
EpisodePlan = Callable[[int, int], PlannedEpisode]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A simulated run.

    tools: services that are called in order after each turn but the last one.
    scorers: services that are called in order after the last turn.
    driver_s: seconds that the trainer's process needs for a turn, one turn at a time.
    batch_size: prompts of an update.
    group: episodes of a prompt.
    max_staleness: see `rl.max_staleness`. 0: generation and update alternate.
    batches: how batches are collected. `overlapping`, as the trainer does: a batch starts when the
    weights allow it and `max_episodes` is not reached. `ordered`, for comparison: it also waits for
    the end of the last one.
    max_episodes: episodes that run together.
    updates: their number.
    """

    samplers: SamplerSettings
    learner: LearnerSettings
    episode: EpisodePlan
    tools: tuple[ServiceSettings, ...] = ()
    scorers: tuple[ServiceSettings, ...] = ()
    driver_s: float = 0.0
    batch_size: int = 8
    group: int = 8
    max_staleness: int = 0
    batches: Batches = "overlapping"
    max_episodes: int = 1_000_000
    updates: int = 50

    @property
    def batch_episodes(self) -> int:
        """Return the number of episodes of an update."""
        return self.batch_size * self.group


@dataclass(slots=True)
class Usage:
    """Busy seconds of a sampler or service.

    request_s: seconds summed over its requests.
    """

    busy_s: float = 0.0
    request_s: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class SimulatedRun:
    """The result of a simulation.

    wall_s: of the run.
    starts, ends: times of each update's generation, from its first to its last episode.
    learn_starts, update_ends: times of each update's learning and of its weights' arrival.
    ages: of each episode's oldest token, in updates, by update.
    served: how often each episode, as (update, position), was completed.
    """

    settings: RunSettings
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    learn_starts: list[float] = field(default_factory=list)
    update_ends: list[float] = field(default_factory=list)
    ages: list[list[int]] = field(default_factory=list)
    served: dict[tuple[int, int], int] = field(default_factory=dict)
    samplers: list[Usage] = field(default_factory=list)
    services: dict[str, Usage] = field(default_factory=dict)
    learner: Usage = field(default_factory=Usage)
    prefill_tokens: int = 0
    completion_tokens: int = 0

    @property
    def wall_s(self) -> float:
        """Return the seconds of the run."""
        return self.update_ends[-1]

    def update_s(self, skip: int = 0) -> float:
        """Return the mean seconds of an update, without the first `skip` updates."""
        start = self.update_ends[skip - 1] if skip else 0.0
        return (self.wall_s - start) / (len(self.update_ends) - skip)
