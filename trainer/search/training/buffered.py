"""Keep the finished episodes of a batch on disk until a checkpoint holds their update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from trainer.rl.rollout import Rollout
from trainer.runs.batches import RolloutBuffer, is_stale
from trainer.search.images.processor import ImageProcessor, StoredImage
from trainer.search.records import Trajectory


@dataclass(slots=True)
class FinishedEpisodes:
    """Finished episodes and their rollouts, by trajectory id. dropped: number of stored ones that
    were too old to learn from."""

    finished: dict[str, Trajectory] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    dropped: int = 0


class BufferedEpisodes:
    """The episodes of a run's batches in its buffer.

    reader: the policy's image processor; None: it reads only text. load_image: SHA-256 -> PNG.
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
