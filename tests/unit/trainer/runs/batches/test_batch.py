"""Test which rollouts of a batch are too old to learn from."""

from __future__ import annotations

from trainer.rl.rollout import Rollout
from trainer.runs.batches import Batch, drop_stale, is_stale, oldest_version


def rollout(group: int, versions: list[int] | None, mask: list[bool] | None = None) -> Rollout:
    return Rollout(
        group=group,
        prompt_input_ids=[1],
        completion_token_ids=[2, 3, 4],
        finish_reason="eos",
        action_mask=mask,
        weight_versions=versions,
    )


def test_the_age_of_a_rollout_is_that_of_its_oldest_sampled_token():
    assert oldest_version(rollout(0, [5, 3, 4])) == 3
    assert oldest_version(rollout(0, [5, 3, 4], [True, False, True])) == 4
    assert oldest_version(rollout(0, None)) is None
    assert oldest_version(rollout(0, [1, 1, 1], [False] * 3)) is None


def test_the_bound_itself_may_be_learned_from():
    for version, bound, expected in ((5, 0, False), (4, 0, True), (4, 1, False), (3, 1, True)):
        assert is_stale(rollout(0, [version, 6, 6]), 6, bound) is expected
    assert not is_stale(rollout(0, [9, 9, 9]), 6, 0)  # of a run that was killed, before its resume
    assert not is_stale(rollout(0, None), 6, 0)


def test_a_group_with_a_rollout_beyond_the_bound_is_left_out_and_counted():
    rollouts = [
        rollout(0, [4, 4, 4]),
        rollout(0, [2, 5, 5]),
        rollout(1, [4, 5, 5]),
        rollout(2, [1, 1, 1]),  # without a reward: not among those that count
        rollout(3, None),
    ]
    batch: Batch = Batch(rollouts, ["a", "b", "c", "d", "e"], [0, 1, 2, 4], dropped_stale=7)
    drop_stale(batch, 6, 1)
    assert batch.scored_indices == [2, 4] and batch.dropped_stale == 7 + 2
    assert batch.select_scored() == ([rollouts[2], rollouts[4]], ["c", "e"])
    assert len(batch.rollouts) == 5  # the dump and the stats still have them
