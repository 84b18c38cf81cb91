"""Rollouts of an update with their log-probabilities and rewards."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from scorekit.seeds import stream_seed
from trainer.rl.policy import autocast
from trainer.rl.sampler import Sampler
from trainer.rl.world import World
from trainer.runs.learner import Learner, add_logprobs
from trainer.runs.leaving import Leaving
from trainer.runs.loop import Batch, batch_indices
from trainer.runs.runlog import Clock
from trainer.translation.config import TrainerConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.formula import sample_rewards
from trainer.translation.rewards.score_batch import AskedBatch, Group
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rollouts import TranslationRollout, stream_rollouts

log = logging.getLogger(__name__)

#: A prompt's samples with their rewards.
Scored = list[tuple[list[TranslationRollout], list[SampleReward]]]


class Collector:
    """Draws and scores the batch of an update; every process of the world its share."""

    def __init__(
        self,
        cfg: TrainerConfig,
        world: World,
        rewarder: Rewarder,
        learner: Learner,
        leaving: Leaving,
    ) -> None:
        self.cfg, self.world, self.rewarder = cfg, world, rewarder
        self.learner, self.leaving = learner, leaving
        #: Why the last batch has no rewards, in one line; None: it has, or the run is to end.
        self.fault: str | None = None
        #: How often the services were asked for it.
        self.attempts = 0

    def collect(
        self, sampler: Sampler, update: int, clock: Clock
    ) -> Batch[TranslationRollout, SampleReward] | None:
        """The whole batch. None where the services gave it no score at all, in
        `stop.skipped_updates` attempts, or until the run was asked to end: then the update has not
        begun, and its prompts are those of the next attempt.

        A prompt's samples go to the services as soon as they are there, while others are still
        generated; and while the last of them are scored, the forward passes are made. `reward_s`
        is what is left to wait for then.
        """
        batch, groups, asked = self._sample(sampler, update, clock)
        self.attempts, self.fault = 1, None
        while True:
            self.world.at(f"update {update}, rewards")
            scored: Scored = [
                (group, sample_rewards(group, scores.result(), self.cfg.reward))
                for group, scores in zip(groups, asked, strict=True)
            ]
            clock.lap("reward_s")
            hurried = any(self.world.gather([batch.hurried]))
            whole = sorted(self.world.gather(scored), key=lambda pair: pair[0][0].group)
            rewards = [reward for _, rewards in whole for reward in rewards]
            fault = None if hurried else unanswered(rewards)
            if not hurried and fault is None:
                rollouts = [rollout for group, _ in whole for rollout in group]
                kept = [i for i, reward in enumerate(rewards) if reward.r_seq is not None]
                return Batch(rollouts, rewards, kept, self.attempts)
            leaves = hurried or any(self.world.gather([bool(self.leaving.asked)]))
            if leaves or not self._goes_on(update, fault or ""):
                return None
            self.attempts += 1
            batch = self._batch()
            asked = [_submit(batch, group) for group in groups]

    def _goes_on(self, update: int, fault: str) -> bool:
        """Whether to ask once more after this fault; says which of the two."""
        limit = self.cfg.stop.skipped_updates
        if self.attempts == limit:
            self.fault = (
                f"update {update} has no rewards: no sample was scored in {limit} attempts in a "
                f"row (stop.skipped_updates), {fault}: see to the services, then go on with "
                "--resume; the prompts of this update are not used up"
            )
            return False
        if self.world.is_main:
            log.warning(
                "update %d waits for rewards: attempt %d of %s gave no score (%s); the same "
                "samples are asked for again",
                update,
                self.attempts,
                limit or "any number",
                fault,
            )
        time.sleep(1.0)
        return True

    def _batch(self) -> AskedBatch:
        return self.rewarder.batch(hurry=lambda: bool(self.leaving.asked))

    def _sample(
        self, sampler: Sampler, update: int, clock: Clock
    ) -> tuple[AskedBatch, list[list[TranslationRollout]], list[Group]]:
        """This process's groups, put to the services."""
        cfg, rl, learner = self.cfg, self.cfg.rl, self.learner
        prompts = rl.batch_size * rl.grad_accum
        mine = self.world.share(batch_indices(len(learner.train), prompts, update, cfg.misc.seed))
        groups: list[list[TranslationRollout]] = []
        batch, asked = self._batch(), []
        self.world.at(f"update {update}, sampling")
        with autocast(self.world.device, cfg.misc.dtype):
            for group in stream_rollouts(
                sampler,
                [learner.train[i] for _, i in mine],
                learner.model,
                learner.tokenizer,
                cfg.generation,
                seed=stream_seed("sampling", cfg.misc.seed, update, self.world.rank),
                groups=[place for place, _ in mine],
            ):
                groups.append(group)
                asked.append(_submit(batch, group))
            clock.lap("rollout_s")
            self.world.at(f"update {update}, log probabilities")
            add_logprobs([r for group in groups for r in group], learner, cfg, self.world)
        clock.lap("logprob_s")
        return batch, groups, asked


def unanswered(rewards: Sequence[SampleReward]) -> str | None:
    """Why a batch has no score, where it may have one later: no sample was scored, and a service
    failed that may come back. Else None."""
    if any(reward.r_seq is not None for reward in rewards):
        return None
    return next((reward.service_error for reward in rewards if reward.may_pass), None)


def _submit(batch: AskedBatch, group: Sequence[TranslationRollout]) -> Group:
    return batch.submit([rollout.scored_text for rollout in group])
