"""Collect the rollouts of an update, with log-probabilities and rewards.

The samples of a prompt are on their way to rewards as a `PendingGroup`. A run that generates early
keeps them, and their scores, on disk until then (`BufferedSamples`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from scorekit.schemas import Failed, JudgeScored, Scored
from scorekit.seeds import stream_seed
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.sampler import Sampler
from trainer.runs.batches import Batch, RolloutBuffer, batch_indices, is_stale
from trainer.runs.learner import add_logprobs
from trainer.runs.open import OpenRun
from trainer.runs.run_log import PhaseTimer
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.reward_batch import Composed, RewardBatch, SampleGroup, Scores
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rollouts import TranslationRollout, stream_rollouts

log = logging.getLogger(__name__)

#: The samples of a prompt with their rewards.
ScoredGroups = list[tuple[list[TranslationRollout], list[SampleReward]]]
_RESULTS = TypeAdapter(dict[str, list[Composed | Scored | JudgeScored | Failed]])


class PendingGroup:
    """The samples of one prompt, and their scores when they are there."""

    def __init__(self, rollouts: list[TranslationRollout], stored: Scores | None = None) -> None:
        self.rollouts, self._stored = rollouts, stored
        self._pending: SampleGroup | None = None

    @property
    def index(self) -> int:
        """Return the index of its prompt in the batch."""
        return self.rollouts[0].group

    @property
    def was_stored(self) -> bool:
        """Return whether the scores were in the buffer."""
        return self._stored is not None

    def submit(self, batch: RewardBatch) -> None:
        """Request the scores, unless they are stored."""
        if self._stored is None:
            self._pending = batch.submit([rollout.reward_fields for rollout in self.rollouts])

    def scores(self) -> Scores:
        """Return the scores, after waiting for them. Raises what `SampleGroup.result` raises."""
        if self._stored is not None:
            return self._stored
        assert self._pending is not None, "submit it first"
        return self._pending.result()


class BufferedSamples:
    """The samples and scores of a run's batches in its buffer.

    Scores belong to texts: several files, in any order, may have the samples of a prompt and their
    scores, because each process of each start writes its own.

    dropped: number of samples of the last `read` that were too old to learn from.
    """

    def __init__(self, buffer: RolloutBuffer, cfg: TranslationConfig) -> None:
        self._buffer, self._cfg, self.dropped = buffer, cfg, 0
        self._scores: dict[str, Scores] = {}  # of the last `read`, by `_text_key`

    def store_rollouts(self, update: int, rollouts: Sequence[TranslationRollout]) -> None:
        """Keep the samples of a prompt."""
        rows = [asdict(rollout) for rollout in rollouts]
        self._buffer.append(update, {"group": rollouts[0].group, "rollouts": rows})

    def store_scores(self, update: int, group: PendingGroup, scores: Scores) -> None:
        """Keep the scores of a prompt's samples, unless asking again may give others."""
        results = scores.results
        if any(
            isinstance(result, Failed) and result.error.retryable
            for of_service in results.values()
            for result in of_service
        ):
            return
        stored = _RESULTS.dump_python(results, mode="json")
        row = {"group": group.index, "texts": _text_key(group.rollouts), "scores": stored}
        self._buffer.append(update, row)

    def read(self, update: int, indices: Sequence[int]) -> list[PendingGroup]:
        """Return the stored groups of these prompts that are not too old.

        If this process samples, they are returned only if none is missing: the batch's random
        stream then gives the same samples again.
        """
        limit, own_groups = self._cfg.rl.max_staleness, set(indices)
        fresh: dict[int, list[TranslationRollout]] = {}
        stale: dict[int, int] = {}
        self._scores = {}
        for row in self._buffer.read(update):
            group = row["group"]
            if group not in own_groups:
                continue
            if "scores" in row:
                self._scores[row["texts"]] = Scores(_RESULTS.validate_python(row["scores"]))
                continue
            rollouts = [_rollout(fields) for fields in row["rollouts"]]
            if any(is_stale(rollout, update, limit) for rollout in rollouts):
                stale[group] = len(rollouts)
            else:
                fresh[group] = rollouts
        self.dropped = sum(count for group, count in stale.items() if group not in fresh)
        if self._cfg.generation.engine == "generate" and len(fresh) < len(own_groups):
            return []
        return [self.pending(fresh[group]) for group in sorted(fresh)]

    def pending(self, rollouts: list[TranslationRollout]) -> PendingGroup:
        """Return the samples of a prompt, with their scores if the last `read` has found some."""
        return PendingGroup(rollouts, self._scores.get(_text_key(rollouts)))


def _text_key(rollouts: Sequence[TranslationRollout]) -> str:
    """Return a name of the texts of a prompt that were scored."""
    texts = json.dumps([rollouts[0].group, *(rollout.scored_text for rollout in rollouts)])
    return hashlib.sha256(texts.encode()).hexdigest()[:32]


def _rollout(fields: dict[str, Any]) -> TranslationRollout:
    offsets = [(start, end) for start, end in fields["token_char_offsets"]]
    return TranslationRollout(**{**fields, "token_char_offsets": offsets, "images": ()})


class Collector:
    """Samples and scores the batch of an update; every process does its share.

    With a buffer the log-probabilities are left to the caller.
    """

    def __init__(
        self,
        run: OpenRun[TranslationConfig],
        rewarder: RewardClient,
        world: DistributedContext,
        buffer: RolloutBuffer | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Prepare to collect batches, one at a time.

        world, buffer, should_stop: as `OpensCollectors.open_collector` says.
        """
        self.cfg, self.world, self.rewarder, self.learner = run.cfg, world, rewarder, run.learner
        self._should_stop = should_stop or (lambda: bool(run.shutdown.signal_number))
        self._samples = None if buffer is None else BufferedSamples(buffer, run.cfg)
        #: The reason why the last batch has no rewards, in one line; None: it has, or the run ends.
        self.stop_reason: str | None = None
        #: Number of attempts to get rewards for it.
        self.attempts = 0

    def collect(
        self, sampler: Sampler, update: int, clock: PhaseTimer
    ) -> Batch[TranslationRollout, SampleReward] | None:
        """Return the full batch, or None without any score.

        That is so if the services gave none in `stop.skipped_updates` attempts, or until the run
        was asked to end. The update has then not started, and the next attempt uses the same
        prompts.

        The samples of a prompt go to the services when they are ready, while others are still
        generated. The forward passes run while the last ones are scored. `reward_s` is the
        remaining waiting time after that.
        """
        batch = self._batch()
        groups = self._sample(sampler, update, batch, clock)
        self.attempts, self.stop_reason = 1, None
        while True:
            self.world.set_phase(f"update {update}, rewards")
            scored: ScoredGroups = [
                (group.rollouts, self._rewards(update, group)) for group in groups
            ]
            clock.lap("reward_s")
            was_interrupted = any(self.world.gather([batch.was_stopped]))
            gathered = sorted(self.world.gather(scored), key=lambda pair: pair[0][0].group)
            rewards = [reward for _, rewards in gathered for reward in rewards]
            reason = None if was_interrupted else unanswered(rewards)
            if not was_interrupted and reason is None:
                rollouts = [rollout for group, _ in gathered for rollout in group]
                scored_indices = [i for i, reward in enumerate(rewards) if reward.r_seq is not None]
                dropped = 0 if self._samples is None else self._samples.dropped
                return Batch(rollouts, rewards, scored_indices, self.attempts, dropped)
            should_stop = was_interrupted or any(self.world.gather([self._should_stop()]))
            if should_stop or not self._should_retry(update, reason or ""):
                return None
            self.attempts += 1
            batch = self._batch()
            for group in groups:
                group.submit(batch)

    def _should_retry(self, update: int, reason: str) -> bool:
        """Return whether to request the scores again; record or log the reason."""
        limit = self.cfg.stop.skipped_updates
        if self.attempts == limit:
            self.stop_reason = (
                f"update {update} has no rewards: no sample was scored in {limit} attempts in a "
                f"row (stop.skipped_updates), {reason}. Repair the services, then resume with "
                "--resume; the prompts of this update remain unused"
            )
            return False
        if self.world.is_main:
            log.warning(
                "update %d waits for rewards: attempt %d of %s gave no score (%s). The same "
                "samples are scored again.",
                update,
                self.attempts,
                limit or "any number",
                reason,
            )
        time.sleep(1.0)
        return True

    def _batch(self) -> RewardBatch:
        return self.rewarder.batch(should_stop=self._should_stop)

    def _rewards(self, update: int, group: PendingGroup) -> list[SampleReward]:
        """Wait for the scores of a group, and return its rewards."""
        scores = group.scores()
        if self._samples is not None and not group.was_stored:
            self._samples.store_scores(update, group, scores)
        return compute_rewards(group.rollouts, scores, self.cfg.reward)

    def _sample(
        self, sampler: Sampler, update: int, batch: RewardBatch, clock: PhaseTimer
    ) -> list[PendingGroup]:
        """Sample this process's groups and submit them to the services."""
        cfg, rl, learner, samples = self.cfg, self.cfg.rl, self.learner, self._samples
        prompts = rl.batch_size * rl.grad_accum
        own_prompts = self.world.split_items(
            batch_indices(len(learner.train), prompts, update, cfg.misc.seed)
        )
        groups: list[PendingGroup] = []
        if samples is not None:
            groups = samples.read(update, [group_index for group_index, _ in own_prompts])
            for group in groups:
                group.submit(batch)
        stored = {group.index for group in groups}
        missing = [pair for pair in own_prompts if pair[0] not in stored]
        self.world.set_phase(f"update {update}, sampling")
        with autocast(self.world.device, cfg.misc.dtype):
            for rollouts in stream_rollouts(
                sampler,
                [learner.train[i] for _, i in missing],
                learner.model,
                learner.tokenizer,
                cfg.generation,
                seed=stream_seed("sampling", cfg.misc.seed, update, self.world.rank),
                groups=[group_index for group_index, _ in missing],
            ):
                if samples is None:
                    groups.append(PendingGroup(rollouts))
                else:
                    samples.store_rollouts(update, rollouts)
                    groups.append(samples.pending(rollouts))
                groups[-1].submit(batch)
            clock.lap("rollout_s")
            if samples is None:
                self.world.set_phase(f"update {update}, log probabilities")
                add_logprobs([r for g in groups for r in g.rollouts], learner, cfg, self.world)
                clock.lap("logprob_s")
        return groups


def unanswered(rewards: Sequence[SampleReward]) -> str | None:
    """Return why a batch has no score now but may have one later; else None.

    That is so if no sample was scored, and the error of a service is transient.
    """
    if any(reward.r_seq is not None for reward in rewards):
        return None
    return next((reward.service_error for reward in rewards if reward.is_transient), None)
