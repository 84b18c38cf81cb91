"""The episodes of an update with their rewards and log-probabilities."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from scorekit.errors import IndexChanged, UserError
from scorekit.seeds import stream_seed
from trainer.rl.policy import autocast
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler
from trainer.rl.world import World
from trainer.runs.figures import Figures
from trainer.runs.learner import add_logprobs
from trainer.runs.leaving import Leaving
from trainer.runs.loop import Batch, batch_indices
from trainer.runs.runlog import Clock
from trainer.search.config import SearchConfig
from trainer.search.episodes import Episodes
from trainer.search.records import Question, Trajectory
from trainer.search.reward.stream import Hurried
from trainer.search.training.figures import without_spread
from trainer.search.training.loading import SearchLearner
from trainer.search.turns.episode import group_names

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SearchBatch(Batch[Rollout, Trajectory]):
    """final: all episodes of the update, those without a reward or without a turn of the policy
    among them. waited: figures of the waiting for rewards."""

    final: Mapping[str, Trajectory] = field(default_factory=dict)
    waited: Figures = field(default_factory=dict)


@dataclass(slots=True)
class _Drawn:
    """Episodes that have ended, of all processes, and what can be learned from them, by their ids;
    places: of their questions."""

    ended: dict[str, Trajectory]
    rollouts: dict[str, Rollout]


class EpisodeCollector:
    """Draws the episodes of an update and waits for their rewards; every process of the world plays
    its share."""

    def __init__(
        self,
        cfg: SearchConfig,
        world: World,
        episodes: Episodes,
        searcher: SearchLearner,
        leaving: Leaving,
    ) -> None:
        self.cfg, self.world, self.episodes = cfg, world, episodes
        self.searcher, self.leaving = searcher, leaving
        #: Why the last update has no rewards, in one line; None: it has, or the run is to end.
        self.fault: str | None = None

    def collect(self, sampler: Sampler, update: int, clock: Clock) -> SearchBatch | None:
        """All episodes of the update, in the order of their places. None where no episode got a
        reward in `stop.skipped_updates` attempts, somebody has to mend something (the money is
        spent, the index is another), or the run was asked to end while it waited: then the update
        has not begun, and the next attempt at it has the same questions and draws the same
        episodes.

        Rewards are asked for as each episode ends, while others still search. `reward_s` is what
        is left to wait for when all have. Of groups without spread, others are drawn in their
        place as often as `rollout.dynamic_sampling` says.
        """
        self.fault = None
        final: dict[str, Trajectory] = {}  # of the rounds that have their rewards
        try:
            return self._collect(sampler, update, clock, final)
        except Hurried:
            return None
        except (UserError, IndexChanged) as error:
            self.fault = to_mend(f"update {update}", error)
            if (stream := self.episodes.stream) is not None:
                ended = stream.so_far(update, self.cfg.rollout.deadline_s)
                self._store(update, final | {one.trajectory_id: one for one in ended})
            return None

    def _collect(
        self, sampler: Sampler, update: int, clock: Clock, final: dict[str, Trajectory]
    ) -> SearchBatch | None:
        wanted = self.cfg.rl.batch_size * self.cfg.rl.grad_accum
        order = self._order(update, wanted)
        batch = SearchBatch([], [], [], final=final)
        rollouts: dict[str, Rollout] = {}
        for number in range(1 + self.cfg.rollout.dynamic_sampling):
            missing = wanted - len({t.group for t in final.values()} - without_spread(final))
            if not missing or not order:
                break
            chosen, order = order[:missing], order[missing:]
            found = self._rewarded(sampler, update, number, chosen, batch, clock)
            if found is None:
                return None
            final |= found[0]
            rollouts |= found[1]
        self._store(update, final)
        for id, rollout in rollouts.items():
            reward = final[id].reward
            if reward is not None and reward.status == "ok":
                batch.kept.append(len(batch.rollouts))
            batch.rollouts.append(rollout)
            batch.rewards.append(final[id])
        return batch

    def _order(self, update: int, wanted: int) -> list[tuple[int, Question]]:
        """(place, question) of those of the update, and behind them of those that may come in
        place of some: all others, in an order of their own."""
        train, seed = self.searcher.learner.train, self.cfg.misc.seed
        first = batch_indices(len(train), wanted, update, seed)
        further: list[int] = []
        if self.cfg.rollout.dynamic_sampling:
            generator = torch.Generator().manual_seed(stream_seed("further", seed, update))
            drawn = torch.randperm(len(train), generator=generator).tolist()
            further = [index for index in drawn if index not in set(first)]
        return list(enumerate(train[index] for index in (*first, *further)))

    def _rewarded(
        self,
        sampler: Sampler,
        update: int,
        number: int,
        chosen: Sequence[tuple[int, Question]],
        batch: SearchBatch,
        clock: Clock,
    ) -> tuple[dict[str, Trajectory], dict[str, Rollout]] | None:
        """Episodes of these questions with their rewards, and their rollouts. batch: of the update;
        `final` has the rounds before."""
        attempt = self._next_attempt(update)
        drawn = self._draw(sampler, update, number, chosen, attempt, clock)
        for tries in count(1):
            self.world.at(f"update {update}, rewards")
            final = self.episodes.rewarded(update, drawn.ended)
            clock.lap("reward_s")
            self._note_waiting(batch)
            batch.attempts = max(batch.attempts, tries)
            if (fault := unanswered(final)) is None:
                return final, drawn.rollouts
            self._store(update, {**batch.final, **final})
            leaves = any(self.world.gather([bool(self.leaving.asked)]))
            if leaves or not self._goes_on(update, tries, fault):
                return None
            attempt = self._next_attempt(update)
            if any(one.end != "failed" for one in failures(final)):
                drawn.ended = self.episodes.again(drawn.ended, attempt)
            else:  # the retriever was away: there is nothing to ask about
                drawn = self._draw(sampler, update, number, chosen, attempt, clock)
        raise AssertionError

    def _draw(
        self,
        sampler: Sampler,
        update: int,
        number: int,
        chosen: Sequence[tuple[int, Question]],
        attempt: int,
        clock: Clock,
    ) -> _Drawn:
        """Let the policy search, each process for its share of the questions. number: of the round
        of dynamic sampling."""
        cfg, world, searcher = self.cfg, self.world, self.searcher
        mine = [chosen[place] for place, _ in world.share(chosen)]
        world.at(f"update {update}, sampling")
        policy = searcher.policy(
            sampler,
            cfg.generation,
            world,
            seed=stream_seed("episodes", cfg.misc.seed, update, world.rank, number),
            with_logprobs=True,
        )
        with autocast(world.device, cfg.misc.dtype):
            names = group_names([question for _, question in chosen])
            ended = self.episodes.run(
                policy,
                mine,
                step=update,
                attempt=attempt,
                samples=cfg.rollout.n_agent,
                groups=dict(zip((place for place, _ in chosen), names, strict=True)),
            )
            clock.lap("rollout_s")
            world.at(f"update {update}, log probabilities")
            rollouts = {
                id: joined.rollout(id, _place(id), searcher.ids.stops)
                for id, joined in policy.ended.items()
                if joined.completion_ids
            }
            add_logprobs(list(rollouts.values()), searcher.learner, cfg, world)
        clock.lap("logprob_s")
        whole: dict[str, Rollout] = {}
        for theirs in world.gather([rollouts]):
            whole |= theirs
        return _Drawn(ended, {id: whole[id] for id in ended if id in whole})

    def _goes_on(self, update: int, tries: int, fault: str) -> bool:
        """Whether to ask once more after this fault; says which of the two."""
        limit = self.cfg.stop.skipped_updates
        if tries == limit:
            self.fault = (
                f"update {update} has no rewards: no episode got one in {limit} attempts in a row "
                f"(stop.skipped_updates), {fault}: see to the services, then go on with --resume; "
                "the questions of this update are not used up"
            )
            return False
        if self.world.is_main:
            log.warning(
                "update %d waits for rewards: attempt %d of %s gave none (%s); the same episodes "
                "are tried again",
                update,
                tries,
                limit or "any number",
                fault,
            )
        time.sleep(1.0)
        return True

    def _next_attempt(self, update: int) -> int:
        own = self.episodes.store.next_attempt(update) if self.world.is_main else 0
        return self.world.gather([own])[0]

    def _store(self, update: int, final: Mapping[str, Trajectory]) -> None:
        """As one attempt, the latest of its parts."""
        if self.world.is_main and final:
            latest = max(one.attempt for one in final.values())
            whole = [one.model_copy(update={"attempt": latest}) for one in final.values()]
            self.episodes.store.write_step(update, whole)

    def _note_waiting(self, batch: SearchBatch) -> None:
        stream = self.episodes.stream
        if stream is None:
            return
        for name in ("reward_waited_s", "reward_dropped"):
            batch.waited[name] = (batch.waited.get(name) or 0) + stream.figures[name]


def unanswered(final: Mapping[str, Trajectory]) -> str | None:
    """Why the update is to wait: at least half of its episodes failed, and of the others none that
    was answered for by whoever failed them. None: it goes on.

    Some earn their 0 though everybody is away: who saw nothing, or broke the format. To learn from
    them alone would use the questions up.
    """
    failed = failures(final)
    if 2 * len(failed) < len(final) or not failed:
        return None
    searching = all(one.end == "failed" for one in failed)  # else generator or judge are away
    without = {one.trajectory_id for one in failed}
    for one in final.values():
        searched = any(turn.action == "search" for turn in one.turns)
        answered = one.answer is not None and one.answer.status == "ok"
        if one.trajectory_id not in without and (searched if searching else answered):
            return None
    rewards = [one.reward for one in failed if one.reward is not None]
    return next((reward.error for reward in rewards if reward.error), "nobody says why")


def failures(final: Mapping[str, Trajectory]) -> list[Trajectory]:
    """The episodes that have no reward because somebody did not answer, or not in time."""
    without = ("failed", "late")
    return [one for one in final.values() if one.reward and one.reward.status in without]


def to_mend(what: str, error: Exception) -> str:
    """Why a run ends, in one line."""
    told = str(error)
    return told if "--resume" in told else f"{what}: {told}; mend that, and go on with --resume"


def _place(trajectory_id: str) -> int:
    """Of its question in the step."""
    return int(trajectory_id.rsplit("-", 2)[1])
