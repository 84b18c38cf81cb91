"""Decide the number of episodes of each question of an update, while a run trains.

A group of episodes teaches only if some succeed and some fail. Of n episodes with the success
probability p that has the probability 1 - p^n - (1 - p)^n, which Knapsack RL (arXiv 2509.25849)
uses as the value of n rollouts of a prompt, with p from the epoch before. Here p is not known: it
has a Beta posterior, as in CERO (Bayesian estimates of p for rollout allocation), and the value is
the posterior mean. The factor of Knapsack RL for what an update gains, p (1 - p)^2, is left out: a
rare failure counts as much as a rare success.

Update u with `rl.max_staleness` s uses the results of the updates up to u - 1 - s: they are
complete when its batch begins, whatever runs ahead. A decision is written to

    RUN/online_budget/update-000007-0.json      of update 7, round 0 of its dynamic sampling

before its first episode, and read again by a resumed run, so that a lost update has the same
numbers of episodes.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel

from scorekit.errors import UserError
from scorekit.numeric import below
from scorekit.paid.account import sum_charges
from trainer.rl.distributed import DistributedContext
from trainer.runs.run_log import write_json
from trainer.runs.stats import Stats
from trainer.search.answer.estimate import worst_case
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.config import SearchConfig
from trainer.search.evaluation.stats import document_of
from trainer.search.records import Question, Trajectory
from trainer.search.training.upper_bounds import most_turns
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

log = logging.getLogger(__name__)
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

    cost: of an episode.
    reserved: episodes that are paid for besides.
    updates: how many remain.
    """
    return max(0, math.floor((money / cost - reserved) / updates))


class Results:
    """The successes and episodes so far: of each question, document and type, and of all."""

    def __init__(self, success: float) -> None:
        """Start without results.

        success: least reward of a successful episode.
        """
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
        """Return how likely an episode of a question succeeds, as a Beta distribution.

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


DECISIONS = "online_budget"


class BudgetDecision(BaseModel):
    """The episodes of the questions of one round of an update.

    counts: episodes of each question, by its position.
    spread: mean probability that the group has both a success and a failure.
    money_left: None without a cap.
    """

    questions: dict[int, str]
    counts: dict[int, int]
    spread: float
    money_left: float | None

    def stats(self) -> Stats:
        """Return the stats for the log."""
        counts = list(self.counts.values())
        return {
            "budget_episodes_min": min(counts),
            "budget_episodes_mean": fmean(counts),
            "budget_episodes_max": max(counts),
            "budget_spread_expected": self.spread,
            "budget_money_left": self.money_left,
        }


def check_online_budget(cfg: SearchConfig, train: Sequence[Question]) -> None:
    """Raise UserError if the budget cannot be chosen online as the config says."""
    section = cfg.rollout.online_budget
    if section.n_max is None:
        return
    if ids := [question.id for question in train if question.n_agent is not None]:
        raise UserError(
            f"rollout.online_budget: {len(ids)} questions of data.train have an n_agent of their "
            f"own ({ids[0]} first). Remove theirs, or set rollout.online_budget.n_max to null."
        )
    for run in section.earlier:
        try:
            TrajectoryStore(Path(run) / FOLDER)
        except UserError as error:
            raise UserError(f"rollout.online_budget.earlier: {error}") from None


class OnlineBudget:
    """Decides the numbers of episodes of the batches that one collector collects.

    The main process decides for all.
    """

    def __init__(
        self,
        cfg: SearchConfig,
        train: Sequence[Question],
        evaluated: int,
        store: TrajectoryStore,
        answering: AnswerPipeline | None,
        world: DistributedContext,
    ) -> None:
        """Prepare to decide.

        train: all questions.
        evaluated: episodes of one evaluation, all sets together.
        store: of this run; on a resume it ends with the checkpoint.
        answering: None: nothing is paid for.
        world: of the collector's thread.
        """
        self.cfg, self._train, self._evaluated = cfg, train, evaluated
        self._store, self._answering, self._world = store, answering, world
        self._rl = cfg.rl.over(len(train))
        self._num_questions = self._rl.batch_size * self._rl.grad_accum
        self._folder = Path(cfg.misc.run_dir) / DECISIONS
        self.results = Results(cfg.rollout.online_budget.success)
        self._read_until = self._played = self._played_first = 0
        for run in cfg.rollout.online_budget.earlier if world.is_main else ():
            self.results.add(TrajectoryStore(Path(run) / FOLDER).read(tokens=False))

    def decide(
        self, update: int, number: int, chosen: Sequence[tuple[int, Question]]
    ) -> BudgetDecision:
        """Return the decision about a round's questions, the same on every process.

        number: of the round; the first, 0, has all questions of the update.
        chosen: (position, question).
        """
        spent = self._spent()
        is_main = self._world.is_main
        decisions = [self._decide(update, number, chosen, spent)] if is_main else []
        return self._world.gather(decisions)[0]

    def stats(self, decisions: Sequence[BudgetDecision], final: Mapping[str, Trajectory]) -> Stats:
        """Return the stats of an update: of its first decision, and what came of all."""
        outcomes: dict[str, set[bool | None]] = defaultdict(set)
        for trajectory in final.values():
            outcomes[trajectory.group].add(self.results.is_success(trajectory))
        spread = fmean({True, False} <= kinds for kinds in outcomes.values())
        return decisions[0].stats() | {"budget_spread": spread}

    def _decide(
        self, update: int, number: int, chosen: Sequence[tuple[int, Question]], spent: float
    ) -> BudgetDecision:
        questions = {position: question.id for position, question in chosen}
        path = self._path(update, number)
        decision = _read(path)
        if decision is None or decision.questions != questions:
            self._read_results(self._results_end(update))
            decision = self._new_decision(update, number, chosen, spent)
            self._folder.mkdir(exist_ok=True)
            write_json(path, decision.model_dump())
        counts = list(decision.counts.values())
        left = decision.money_left
        log.info(
            "update %d: %d episodes of %d questions, %d to %d each; groups with both success and "
            "failure: %.2f expected%s",
            update,
            sum(counts),
            len(counts),
            min(counts),
            max(counts),
            decision.spread,
            "" if left is None else f"; money left: {left:.4f}",
        )
        return decision

    def _new_decision(
        self, update: int, number: int, chosen: Sequence[tuple[int, Question]], spent: float
    ) -> BudgetDecision:
        section, n_agent = self.cfg.rollout.online_budget, self.cfg.rollout.n_agent
        assert section.n_max is not None
        cap = self.cfg.answering.money.cap if self._answering is not None else None
        total = len(chosen) * n_agent
        if number:  # as many for each question as in the update's first round
            first = _read(self._path(update, 0))
            assert first is not None
            total = len(chosen) * sum(first.counts.values()) // len(first.counts)
        elif cap is not None and spent:
            total = min(total, self._lasting(update, cap - spent, spent))
        total = max(total, LEAST * len(chosen))
        beliefs = [self.results.belief(question) for _, question in chosen]
        fewest = section.n_min if total >= section.n_min * len(chosen) else LEAST
        counts = allocate(beliefs, total, fewest, section.n_max)
        spread = fmean(map(lambda belief, count: belief.spread(count), beliefs, counts))
        positions = [position for position, _ in chosen]
        return BudgetDecision(
            questions={position: question.id for position, question in chosen},
            counts=dict(zip(positions, counts, strict=True)),
            spread=spread,
            money_left=None if cap is None else cap - spent,
        )

    def _lasting(self, update: int, left: float, spent: float) -> int:
        """Return the episodes of this update with which the money lasts to the end of the run.

        An episode costs the mean so far, with evaluations. Batches in flight count as played in
        the mean, and as unpaid in what remains. What one episode may cost at most is not spent.
        """
        last_update = self._results_end(update)
        in_flight = sum(
            sum(decision.counts.values())
            for earlier in range(last_update + 1, update)
            if (decision := _read(self._path(earlier, 0))) is not None
        )
        evaluations = self._evaluations()
        done = self._evaluated * sum(number <= last_update for number in evaluations)
        due = self._evaluated * sum(number > last_update for number in evaluations)
        cost = spent / max(1, self._played + in_flight + done)
        rounds = self._played / self._played_first if self._played_first else 1.0
        remaining = (self._rl.num_updates - update + 1) * rounds
        return affordable(left - self._most_of_one, cost, in_flight + due, remaining)

    def _evaluations(self) -> list[int]:
        """Return the updates after which all sets are evaluated; 0 is the start."""
        every, last = self.cfg.eval.eval_every_n_updates, self._rl.num_updates
        return sorted({0, last, *(range(every, last, every) if every else ())})

    @cached_property
    def _most_of_one(self) -> float:
        """Return what one episode may cost at most, as the mean over the questions."""
        max_images = most_turns(self.cfg, self._train) * self.cfg.episode.pages_per_search
        bound = worst_case(self._train, 1, max_images, self.cfg.answering)
        return sum_charges([bound.generator, bound.judge]).money or 0.0

    def _spent(self) -> float:
        """Return the money that the run has spent, on every process."""
        totals = {} if self._answering is None else self._answering.spent
        return sum(self._world.gather([sum_charges(totals.values()).money or 0.0]))

    def _results_end(self, update: int) -> int:
        """Return the last update whose results an update uses; below 1: none."""
        return update - 1 - self._rl.max_staleness

    def _read_results(self, until: int) -> None:
        """Read the episodes of the updates up to `until` that have not been read."""
        for step in range(self._read_until + 1, until + 1):
            episodes = list(self._store.read([step], tokens=False))
            self.results.add(episodes)
            self._played += len(episodes)
            self._played_first += sum(
                int(t.trajectory_id.rsplit("-", 2)[1]) < self._num_questions for t in episodes
            )
            self._read_until = step

    def _path(self, update: int, number: int) -> Path:
        return self._folder / f"update-{update:06d}-{number}.json"


def _read(path: Path) -> BudgetDecision | None:
    """Return a decision that was written; None if there is none."""
    try:
        return BudgetDecision.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
