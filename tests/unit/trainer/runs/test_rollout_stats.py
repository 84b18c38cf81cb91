"""Check the statistics of a batch of rollouts."""

from __future__ import annotations

import math

import pytest

from tests.kits.trainer.runs import rollout
from trainer.rl.config import RLConfig
from trainer.runs.rollout_stats import importance_stats, rollout_stats


def test_the_samplers_gap_and_the_weights_that_correct_for_it() -> None:
    rollouts = [
        rollout([1], [2, 3], old_logprobs=[-1.0, -2.0], sampler_logprobs=[-1.5, -2.0]),
        rollout([1], [2], old_logprobs=[-1.0], sampler_logprobs=[-4.0]),
    ]
    stats = importance_stats(rollouts, RLConfig(importance_cap=2.0))
    assert stats["sampler_gap_mean"] == pytest.approx(3.5 / 3)
    assert stats["sampler_gap_max"] == pytest.approx(3.0)
    assert stats["importance_weight_mean"] == pytest.approx((math.exp(0.5) + 1 + 2) / 3)
    assert stats["importance_capped_frac"] == pytest.approx(1 / 3)


def test_gspos_weights_are_one_a_sequence_and_what_the_policy_did_not_write_counts_nowhere() -> (
    None
):
    rollouts = [
        rollout(
            [1],
            [2, 3, 4],
            old_logprobs=[-1.0, -9.0, -2.0],
            sampler_logprobs=[-2.0, 0.0, -2.0],
            action_mask=[True, False, True],
        ),
        rollout([1], [2], sampler_logprobs=[-1.0]),  # not trained
    ]
    stats = importance_stats(rollouts, RLConfig(algorithm="gspo", importance_cap=2.0))
    assert stats["sampler_gap_mean"] == pytest.approx(0.5)
    assert stats["sampler_gap_max"] == pytest.approx(1.0)
    assert stats["importance_weight_mean"] == pytest.approx(math.exp(0.5))
    assert stats["importance_capped_frac"] == 0
    batch_stats = rollout_stats(rollouts)
    assert batch_stats["entropy_est"] == pytest.approx(1.5)
    assert (batch_stats["tokens"], batch_stats["completion_length_mean"]) == (3, 1.5)


def test_without_a_correction_there_are_none() -> None:
    stats = importance_stats([rollout([1], [2], old_logprobs=[-1.0])], RLConfig())
    assert set(stats.values()) == {None}
