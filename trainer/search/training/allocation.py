"""Share the episodes of an update out over its questions, from the results so far.

A group of episodes teaches only if some succeed and some fail. Of n episodes with the success
probability p that has the probability 1 - p^n - (1 - p)^n, which Knapsack RL (arXiv 2509.25849)
uses as the value of n rollouts of a prompt, with p from the epoch before. Here p is not known: it
has a Beta posterior, as in CERO (Bayesian estimates of p for rollout allocation), and the value is
the posterior mean. The factor of Knapsack RL for what an update gains, p (1 - p)^2, is left out: a
rare failure counts as much as a rare success.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scorekit.numeric import below
from trainer.search.evaluation.stats import document_of
from trainer.search.records import Question, Trajectory

#: Fewest episodes of a group: a single one has no comparison.
LEAST = 2
#: The mean of wider results counts as so many episodes. Without any it makes Beta(1, 1).
_PRIOR = 2.0


@dataclass(frozen=True, slots=True)
class SuccessBelief:
    """A Beta distribution of a question's success probability.

    successes, failures: its parameters, above 0.
    """

    successes: float
    failures: float

    def spread(self, count: int) -> float:
        """Return the probability that `count` episodes, at least 1, do not all end alike."""
        return 1.0 - self._all(self.successes, count) - self._all(self.failures, count)

    def gain(self, count: int) -> float:
        """Return by how much one episode more than `count`, at least 1, raises `spread`.

        It never rises with `count`: it is the mean of p^n (1 - p) + (1 - p)^n p.
        """
        total = self.successes + self.failures + count
        after_successes = self._all(self.successes, count) * self.failures / total
        return after_successes + self._all(self.failures, count) * self.successes / total

    def _all(self, parameter: float, count: int) -> float:
        """Return the probability that all episodes end in the way that has this parameter."""
        total = self.successes + self.failures
        return math.prod((parameter + n) / (total + n) for n in range(count))


def allocate(beliefs: Sequence[SuccessBelief], total: int, fewest: int, largest: int) -> list[int]:
    """Return the number of episodes of each question; they add up to `total`.

    Each gets `fewest` episodes. Each further one goes to the question whose `spread` it raises
    most, up to `largest`; of equals to the one with fewer, then to the first. As gains never rise,
    no other way has a larger sum of `spread`. Raises ValueError if the total does not fit.
    """
    if not fewest * len(beliefs) <= total <= largest * len(beliefs):
        raise ValueError(f"{total} episodes for {len(beliefs)} questions of {fewest} to {largest}")
    counts = [fewest] * len(beliefs)
    gains = [(-belief.gain(fewest), fewest, index) for index, belief in enumerate(beliefs)]
    heapq.heapify(gains)
    for _ in range(total - sum(counts)):
        _, count, index = heapq.heappop(gains)
        counts[index] = count + 1
        if count + 1 < largest:
            heapq.heappush(gains, (-beliefs[index].gain(count + 1), count + 1, index))
    return counts


def affordable(money: float, cost: float, reserved: float, updates: float) -> int:
    """Return the episodes of an update with which the money lasts for all that remain.

    cost: of an episode. reserved: episodes that are paid for besides. updates: how many remain.
    """
    return max(0, math.floor((money / cost - reserved) / updates))


class Results:
    """The successes and episodes so far: of each question, document and type, and of all."""

    def __init__(self, success: float) -> None:
        """Start without results. success: least reward of a successful episode."""
        self._success = success
        self._counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Add episodes; one without a reward says nothing."""
        for trajectory in trajectories:
            is_success = self.is_success(trajectory)
            if is_success is not None:
                for key in _keys(trajectory.question):
                    counts = self._counts[key]
                    counts[0] += is_success
                    counts[1] += 1

    def is_success(self, trajectory: Trajectory) -> bool | None:
        """Return whether an episode earned enough; None without a reward."""
        value = trajectory.reward_value
        return None if value is None else not below(value, self._success)

    def belief(self, question: Question) -> SuccessBelief:
        """Return what is known of a question.

        Its own episodes count one by one, in whatever update they were. Besides, the mean of its
        document counts as two episodes; to that, the mean of its type; to that, the mean of all.
        """
        mean = 0.5
        *wider_keys, question_key = _keys(question)
        for key in wider_keys:
            successes, count = self._counts.get(key, (0, 0))
            mean = (successes + _PRIOR * mean) / (count + _PRIOR)
        successes, count = self._counts.get(question_key, (0, 0))
        return SuccessBelief(successes + _PRIOR * mean, count - successes + _PRIOR * (1 - mean))


def _keys(question: Question) -> tuple[tuple[str, str], ...]:
    """Return the keys of a question's counts, the widest first."""
    return (
        ("all", ""),
        ("type", question.question_type),
        ("document", document_of(question)),
        ("question", question.id),
    )
