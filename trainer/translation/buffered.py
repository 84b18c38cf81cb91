"""The samples of a batch on their way to rewards, and how they are kept on disk until then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from scorekit.schemas import Failed, JudgeScored, Scored
from trainer.runs.batches import RolloutBuffer, is_stale
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.reward_batch import Composed, RewardBatch, SampleGroup, Scores
from trainer.translation.rollouts import TranslationRollout

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
