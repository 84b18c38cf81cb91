"""Collect the episodes of an update with their rewards and log-probabilities.

With a buffer, finished episodes are on disk until a checkpoint holds their update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from scorekit.errors import IndexChanged, UserError
from scorekit.seeds import stream_seed
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler
from trainer.runs.batches import Batch, RolloutBuffer, batch_indices, is_stale
from trainer.runs.learner import add_logprobs
from trainer.runs.open import OpenRun
from trainer.runs.run_log import PhaseTimer
from trainer.search.config import SearchConfig
from trainer.search.images.processor import ImageProcessor, StoredImage
from trainer.search.records import Question, Trajectory
from trainer.search.reward import WaitAborted, without_spread
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.sampled import SampledPolicy
from trainer.search.training.loading import SearchLearner
from trainer.search.training.online_budget import BudgetDecision, OnlineBudget

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FinishedEpisodes:
    """Finished episodes and their rollouts, by trajectory id.

    dropped: number of stored ones that were too old to learn from.
    """

    finished: dict[str, Trajectory] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    dropped: int = 0


class BufferedEpisodes:
    """The episodes of a run's batches in its buffer.

    reader: the policy's image processor; None: it reads only text.
    load_image: SHA-256 -> PNG.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        reader: ImageProcessor | None,
        load_image: Callable[[str], bytes],
    ) -> None:
        self._buffer, self._reader, self._load_image = buffer, reader, load_image

    def store(self, update: int, trajectory: Trajectory, rollout: Rollout | None) -> None:
        """Keep a finished episode; a failed one is not kept, because it is to run again.

        rollout: None if the policy wrote nothing.
        """
        if trajectory.end == "failed":
            return
        row: dict[str, Any] = {"trajectory": trajectory.model_dump(mode="json"), "rollout": None}
        if rollout is not None:
            row["rollout"] = {
                "group": rollout.group,
                "finish_reason": rollout.finish_reason,
                "old_logprobs": rollout.old_logprobs,
                "weight_versions": rollout.weight_versions,
                "grids": [image.grid for image in rollout.images],
            }
        self._buffer.append(update, row)

    def read(self, update: int, ids: Collection[str], max_staleness: int) -> FinishedEpisodes:
        """Return the stored episodes with these ids that are not too old."""
        stored, stale_ids = FinishedEpisodes(), set()
        for row in self._buffer.read(update):
            trajectory = Trajectory.model_validate(row["trajectory"])
            id = trajectory.trajectory_id
            if id not in ids:
                continue
            rollout = self._rollout(trajectory, row["rollout"])
            if rollout is not None and is_stale(rollout, update, max_staleness):
                stale_ids.add(id)
                continue
            stored.finished[id] = trajectory
            if rollout is not None:
                stored.rollouts[id] = rollout
        stored.dropped = len(stale_ids - stored.finished.keys())
        return stored

    def _rollout(self, trajectory: Trajectory, fields: dict[str, Any] | None) -> Rollout | None:
        """Return the rollout of an episode; its images are read from the store on access."""
        tokens = trajectory.tokens
        if fields is None or tokens is None:
            return None
        grids = fields.pop("grids")
        images = [
            StoredImage(sha256, tuple(grid), self._reader, self._load_image)
            for sha256, grid in zip(tokens.images, grids, strict=True)
            if self._reader is not None
        ]
        return Rollout(
            prompt_input_ids=tokens.prompt_ids,
            completion_token_ids=tokens.completion_ids,
            action_mask=tokens.action_mask,
            images=images,
            trajectory_id=trajectory.trajectory_id,
            temperature=trajectory.question.temperature,
            **fields,
        )


@dataclass(slots=True)
class SearchBatch(Batch[Rollout, Trajectory]):
    """The batch of an update.

    final: all its episodes, also those without a reward or a turn of the policy.
    waited: stats of waiting for rewards.
    decisions: of the online budget, by round.
    """

    final: Mapping[str, Trajectory] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    decisions: list[BudgetDecision] = field(default_factory=list)


class EpisodeCollector:
    """The collector of episodes: it samples those of an update and waits for their rewards.

    Each process of the world runs its part. With a buffer the log-probabilities are left to the
    caller.
    """

    def __init__(
        self,
        run: OpenRun[SearchConfig],
        episodes: EpisodeRunner,
        searcher: SearchLearner,
        world: DistributedContext,
        buffer: RolloutBuffer | None = None,
        budget: OnlineBudget | None = None,
    ) -> None:
        """Prepare to collect batches, one at a time.

        episodes: its world is `world`.
        world, buffer: as `OpensCollectors.open_collector` says.
        budget: decides the numbers of episodes; None: they are those of the rows.
        """
        self.cfg, self.world, self.episodes, self.searcher = run.cfg, world, episodes, searcher
        self.budget = budget
        self._buffered: BufferedEpisodes | None = None
        if buffer is not None:
            load_image = episodes.store.read_image
            self._buffered = BufferedEpisodes(buffer, searcher.ids.reader, load_image)
        #: The reason why the last update has no rewards; None: it has, or the run is stopping.
        self.stop_reason: str | None = None

    def collect(self, sampler: Sampler, update: int, clock: PhaseTimer) -> SearchBatch | None:
        """Return all episodes of the update, ordered by position.

        None if no episode got a reward in `stop.skipped_updates` attempts, if the user must fix
        something (the money is spent, the index changed), or if the run is stopping. Then the
        update has not started, and its next attempt has the same questions and samples.

        Rewards are requested as each episode ends, while others still run. `reward_s` is the
        waiting time after the last end. Groups without spread are replaced up to
        `rollout.dynamic_sampling` times.
        """
        self.stop_reason = None
        final: dict[str, Trajectory] = {}  # of the rounds with rewards
        try:
            return self._collect(sampler, update, clock, final)
        except WaitAborted:
            return None
        except (UserError, IndexChanged) as error:
            self.stop_reason = blocking_reason(f"update {update}", error)
            collected = self.episodes.stream.so_far(update, self.cfg.rollout.deadline_s)
            finished = {t.trajectory_id: t for t in self.world.gather(collected)}
            self._store(update, final | finished)
            return None

    def _collect(
        self, sampler: Sampler, update: int, clock: PhaseTimer, final: dict[str, Trajectory]
    ) -> SearchBatch | None:
        num_questions = self.cfg.rl.batch_size * self.cfg.rl.grad_accum
        order = self._order(update, num_questions)
        batch = SearchBatch([], [], [], final=final)
        rollouts: dict[str, Rollout] = {}
        for number in range(1 + self.cfg.rollout.dynamic_sampling):
            missing = num_questions - len({t.group for t in final.values()} - without_spread(final))
            if not missing or not order:
                break
            chosen, order = order[:missing], order[missing:]
            result = self._run_round(sampler, update, number, chosen, batch, clock)
            if result is None:
                return None
            final |= result[0]
            rollouts |= result[1]
        self._store(update, final)
        for id, rollout in rollouts.items():
            reward = final[id].reward
            if reward is not None and reward.status == "ok":
                batch.scored_indices.append(len(batch.rollouts))
            batch.rollouts.append(rollout)
            batch.rewards.append(final[id])
        return batch

    def _order(self, update: int, num_questions: int) -> list[tuple[int, Question]]:
        """Return (position, question) of the update's questions, then of the possible replacements.

        The replacements are all other questions, in random order.
        """
        train, seed = self.searcher.learner.train, self.cfg.misc.seed
        first = batch_indices(len(train), num_questions, update, seed)
        further: list[int] = []
        if self.cfg.rollout.dynamic_sampling:
            generator = torch.Generator().manual_seed(stream_seed("further", seed, update))
            permutation = torch.randperm(len(train), generator=generator).tolist()
            further = [index for index in permutation if index not in set(first)]
        return list(enumerate(train[index] for index in (*first, *further)))

    def _run_round(
        self,
        sampler: Sampler,
        update: int,
        number: int,
        chosen: Sequence[tuple[int, Question]],
        batch: SearchBatch,
        clock: PhaseTimer,
    ) -> tuple[dict[str, Trajectory], dict[str, Rollout]] | None:
        """Return the rewarded episodes of questions, and their rollouts.

        batch: of the update; its `final` has the earlier rounds.
        """
        attempt, counts = self._next_attempt(update), self._counts(update, number, chosen, batch)
        sampled = self._sample(sampler, update, attempt, chosen, counts, batch, clock)
        for num_tries in count(1):
            self.world.set_phase(f"update {update}, rewards")
            final = self.episodes.collect_rewards(update, sampled.finished)
            clock.lap("reward_s")
            for name in ("reward_waited_s", "reward_dropped"):
                batch.waited[name] = batch.waited.get(name, 0) + self.episodes.stream.stats[name]
            batch.attempts = max(batch.attempts, num_tries)
            if (reason := outage_reason(final)) is None:
                return final, self._gather_rollouts(sampled.rollouts, final)
            self._store(update, {**batch.final, **final})
            is_stopping = any(self.world.gather([self.episodes.should_stop()]))
            if is_stopping or not self._goes_on(update, num_tries, reason):
                return None
            attempt = self._next_attempt(update)
            if any(trajectory.end != "failed" for trajectory in failures(final)):
                sampled.finished = self.episodes.resubmit(sampled.finished, attempt)
            else:  # the retriever was unavailable: run the episodes again
                sampled = self._sample(sampler, update, attempt, chosen, counts, batch, clock)
        raise AssertionError

    def _sample(
        self,
        sampler: Sampler,
        update: int,
        attempt: int,
        chosen: Sequence[tuple[int, Question]],
        counts: Mapping[int, int],
        batch: SearchBatch,
        clock: PhaseTimer,
    ) -> FinishedEpisodes:
        """Run the episodes of questions, each process its part.

        counts: of each position.
        """
        cfg, world, searcher = self.cfg, self.world, self.searcher
        world.set_phase(f"update {update}, sampling")
        policy = SampledPolicy(
            sampler,
            searcher.ids,
            cfg.generation,
            context=searcher.context,
            world=world,
            seed=stream_seed("episodes", cfg.misc.seed, update),
            deterministic=cfg.rollout.deterministic,
        )
        stored = self._stored_episodes(update, counts)
        batch.dropped_stale += stored.dropped
        rollouts = dict(stored.rollouts)

        def note_end(trajectory: Trajectory) -> None:
            id = trajectory.trajectory_id
            episode = policy.ended_episodes.get(id)
            if episode is not None and episode.completion_ids:
                group, own_temperature = _position(id), trajectory.question.temperature
                rollouts[id] = episode.rollout(id, group, searcher.ids.stops, own_temperature)
            if self._buffered is not None:
                self._buffered.store(update, trajectory, rollouts.get(id))

        with autocast(world.device, cfg.misc.dtype):
            finished = self.episodes.run(
                policy,
                chosen,
                step=update,
                attempt=attempt,
                samples=counts,
                stored=stored.finished,
                on_done=note_end,
            )
            rollouts = {id: rollouts[id] for id in finished if id in rollouts}
            clock.lap("rollout_s")
            if self._buffered is None:
                world.set_phase(f"update {update}, log probabilities")
                add_logprobs(list(rollouts.values()), searcher.learner, cfg, world)
                clock.lap("logprob_s")
        return FinishedEpisodes(finished, rollouts)

    def _counts(
        self,
        update: int,
        number: int,
        chosen: Sequence[tuple[int, Question]],
        batch: SearchBatch,
    ) -> Mapping[int, int]:
        """Return the number of episodes of each position."""
        if self.budget is None:
            n_agent = self.cfg.rollout.n_agent
            return {position: question.samples(n_agent) for position, question in chosen}
        batch.decisions.append(self.budget.decide(update, number, chosen))
        return batch.decisions[-1].counts

    def _stored_episodes(self, update: int, counts: Mapping[int, int]) -> FinishedEpisodes:
        """Return the episodes of questions that an earlier start has finished.

        If this process samples, they are returned only if none is missing: then the batch's random
        streams give the same episodes again.
        """
        cfg = self.cfg
        if self._buffered is None:
            return FinishedEpisodes()
        ids = {
            f"{update}-{position}-{sample}"
            for position, count in counts.items()
            for sample in range(count)
        }
        stored = self._buffered.read(update, ids, cfg.rl.max_staleness)
        if cfg.generation.engine == "generate" and len(stored.finished) < len(ids):
            return FinishedEpisodes(dropped=stored.dropped)
        return stored

    def _gather_rollouts(
        self, own_rollouts: dict[str, Rollout], final: Mapping[str, Trajectory]
    ) -> dict[str, Rollout]:
        """Return the rollouts of all processes by id, in the order of the episodes.

        Images do not travel with them: a process that learns from a rollout of another one reads
        its images from the store.
        """
        if self.world.size == 1:
            return own_rollouts
        sent = {
            id: (replace(rollout, images=()), [image.grid for image in rollout.images])
            for id, rollout in own_rollouts.items()
        }
        all_rollouts: dict[str, Rollout] = {}
        for part in self.world.gather([sent]):
            for id, (rollout, grids) in part.items():
                tokens, reader = final[id].tokens, self.searcher.ids.reader
                if grids and tokens is not None and reader is not None:
                    load = self.episodes.store.read_image
                    rollout.images = [
                        StoredImage(sha256, grid, reader, load)
                        for sha256, grid in zip(tokens.images, grids, strict=True)
                    ]
                all_rollouts[id] = own_rollouts.get(id, rollout)
        return all_rollouts

    def _goes_on(self, update: int, num_tries: int, reason: str) -> bool:
        """Return whether to try again after a failure, and log the decision."""
        limit = self.cfg.stop.skipped_updates
        if num_tries == limit:
            self.stop_reason = (
                f"update {update} has no rewards: no episode got one in {limit} attempts in a row "
                f"(stop.skipped_updates), {reason}. Check the services, then continue with "
                "--resume. The questions of this update are used again."
            )
            return False
        if self.world.is_main:
            log.warning(
                "update %d waits for rewards: attempt %d of %s returned none (%s); the same "
                "episodes are tried again",
                update,
                num_tries,
                limit or "any number",
                reason,
            )
        time.sleep(1.0)
        return True

    def _next_attempt(self, update: int) -> int:
        attempt = self.episodes.store.next_attempt(update) if self.world.is_main else 0
        return self.world.gather([attempt])[0]

    def _store(self, update: int, final: Mapping[str, Trajectory]) -> None:
        """Store the episodes of an update as one attempt, the latest of its episodes."""
        if self.world.is_main and final:
            latest = max(trajectory.attempt for trajectory in final.values())
            updated = [
                trajectory.model_copy(update={"attempt": latest}) for trajectory in final.values()
            ]
            self.episodes.store.write_step(update, updated)


def outage_reason(final: Mapping[str, Trajectory]) -> str | None:
    """Return the reason why an update must wait for a service, or None.

    It waits if at least half of its episodes failed, and the failed service answered for none of
    the others. Some episodes get 0 without any service, for example after a format error. Training
    only on them would waste the questions.
    """
    failed = failures(final)
    if 2 * len(failed) < len(final) or not failed:
        return None
    # Otherwise the generator or the judge is unavailable.
    is_retriever_out = all(trajectory.end == "failed" for trajectory in failed)
    failed_ids = {trajectory.trajectory_id for trajectory in failed}
    for trajectory in final.values():
        searched = any(turn.action == "search" for turn in trajectory.turns)
        answered = trajectory.answer is not None and trajectory.answer.status == "ok"
        if trajectory.trajectory_id not in failed_ids and (
            searched if is_retriever_out else answered
        ):
            return None
    rewards = [trajectory.reward for trajectory in failed if trajectory.reward is not None]
    return next((reward.error for reward in rewards if reward.error), "no reason reported")


def failures(final: Mapping[str, Trajectory]) -> list[Trajectory]:
    """Return the episodes without a reward because a service did not answer in time."""
    statuses = ("failed", "late")
    return [
        trajectory
        for trajectory in final.values()
        if trajectory.reward and trajectory.reward.status in statuses
    ]


def blocking_reason(subject: str, error: Exception) -> str:
    """Return a line that says why a run stops and what to do."""
    if "--resume" in str(error):
        return str(error)
    return f"{subject}: {error}. Fix the cause and continue with --resume."


def _position(trajectory_id: str) -> int:
    """Return the position of the question of a trajectory id in its step."""
    return int(trajectory_id.rsplit("-", 2)[1])
