"""Test which episodes of a batch are read back, and that they are equal."""

from __future__ import annotations

from typing import Any, cast

from tests.kits.trainer.searching.finished import episode
from trainer.rl.rollout import Rollout
from trainer.runs.batches import RolloutBuffer
from trainer.search.images.processor import ProcessedImage
from trainer.search.records import TokenRecord, Trajectory, mask_digest
from trainer.search.training.collector import BufferedEpisodes

MASK = [True, False, False, True]
READER: Any = object()


def finished(id: str, version: int) -> tuple[Trajectory, Rollout]:
    """Return an episode of two turns with an image between them, and its rollout."""
    record = TokenRecord(
        prompt_ids=[1, 2],
        completion_ids=[3, 4, 5, 6],
        action_mask=MASK,
        mask_digest=mask_digest(MASK),
        images=["a" * 64],
    )
    rollout = Rollout(
        group=3,
        prompt_input_ids=record.prompt_ids,
        completion_token_ids=record.completion_ids,
        finish_reason="eos",
        action_mask=MASK,
        old_logprobs=[-0.1, 0.0, 0.0, -1e-17],
        weight_versions=[version, 0, 0, version + 1],
        images=[ProcessedImage(b"png", (1, 4, 6), READER)],
        trajectory_id=id,
        temperature=0.7,
    )
    done = episode(id)
    question = done.question.model_copy(update={"temperature": 0.7})
    return done.model_copy(update={"tokens": record, "question": question}), rollout


def opened(folder: Any, rank: int = 0) -> BufferedEpisodes:
    return BufferedEpisodes(RolloutBuffer(folder, rank), READER, lambda sha256: sha256.encode())


def test_an_episode_is_read_as_it_was_stored(tmp_path):
    trajectory, rollout = finished("7-3-0", version=5)
    opened(tmp_path).store(7, trajectory, rollout)
    opened(tmp_path).store(7, episode("7-3-1"), None)
    opened(tmp_path).store(7, *finished("7-4-0", version=5))
    stored = opened(tmp_path, rank=1).read(7, {"7-3-0", "7-3-1"}, max_staleness=1)
    assert stored.finished == {"7-3-0": trajectory, "7-3-1": episode("7-3-1")}
    assert list(stored.rollouts) == ["7-3-0"] and stored.dropped == 0
    read = stored.rollouts["7-3-0"]
    (image,), (stored_image,) = cast(Any, rollout.images), cast(Any, read.images)
    assert (stored_image.grid, stored_image.png, stored_image.reader) == (
        image.grid,
        b"a" * 64,
        READER,
    )
    rollout.images = read.images
    assert read == rollout


def test_an_episode_that_was_run_again_because_it_was_too_old_is_no_loss(tmp_path):
    opened(tmp_path, rank=1).store(7, *finished("7-3-0", version=2))
    opened(tmp_path, rank=1).store(7, *finished("7-3-1", version=2))
    assert opened(tmp_path).read(7, {"7-3-0", "7-3-1"}, max_staleness=3).dropped == 2
    trajectory, rollout = finished("7-3-0", version=5)
    opened(tmp_path).store(7, trajectory, rollout)  # in a file that is read before the other
    stored = opened(tmp_path).read(7, {"7-3-0", "7-3-1"}, max_staleness=3)
    assert stored.rollouts["7-3-0"].weight_versions == rollout.weight_versions
    assert stored.finished == {"7-3-0": trajectory} and stored.dropped == 1
