"""Check the statistics of a batch of rollouts."""

from __future__ import annotations

import math

import pytest

from tests.kits.trainer.runs import rollout
from trainer.rl.config import RLConfig
from trainer.runs.rollout_stats import (
    LEARNING_CURVES,
    importance_stats,
    rollout_stats,
    staleness_stats,
)


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
    assert stats["importance_capped_sequence_frac"] == pytest.approx(1 / 2)
    assert (stats["importance_masked_frac"], stats["importance_masked_sequence_frac"]) == (0, 0)


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


@pytest.mark.parametrize(
    ("mode", "masked_sequences", "weights"),
    [
        ("token_mask", 1 / 3, (math.exp(0.5), 1, 1)),
        ("sequence_mask", 2 / 3, (math.exp(0.5), math.exp(0.5), math.exp(0.5))),
    ],
)
def test_masked_tokens_and_sequences_are_counted(
    mode: str, masked_sequences: float, weights: tuple[float, ...]
) -> None:
    """Check a sequence inside the range whose observation is outside, one with a token and a
    product outside, and one with only such tokens; one that sampled nothing counts nowhere."""
    log_ratios = [[0.5, 9.0, 0.0], [0.0, 1.0], [-2.0]]
    if mode == "sequence_mask":
        log_ratios = [[0.25, 9.0, 0.25, 0.0], [0.5, 0.5], [-2.0]]
    rollouts = [
        rollout(
            [1],
            [2] * len(row),
            old_logprobs=row,
            sampler_logprobs=[0.0] * len(row),
            action_mask=[value != 9.0 for value in row],
        )
        for row in log_ratios
    ]
    nothing = rollout([1], [2], old_logprobs=[0.0], sampler_logprobs=[0.0], action_mask=[False])
    cfg = RLConfig.model_validate({"importance_mode": mode})
    stats = importance_stats([*rollouts, nothing], cfg)
    tokens = sum(sum(sample.actions) for sample in rollouts)
    assert stats["importance_weight_mean"] == pytest.approx(sum(weights) / tokens)
    assert stats["importance_masked_frac"] == pytest.approx(1 - len(weights) / tokens)
    assert stats["importance_masked_sequence_frac"] == pytest.approx(masked_sequences)
    assert (stats["importance_capped_frac"], stats["importance_capped_sequence_frac"]) == (0, 0)
    assert set(importance_stats([nothing], cfg).values()) == {None}


def test_staleness_counts_the_updates_behind_each_sampled_token() -> None:
    """Check a sequence during which the weights were exchanged, observations, and rollouts without
    versions. Update 6 learns with the weights of version 5."""
    rollouts = [
        rollout([1], [2, 2, 2], group=0, weight_versions=[3, 3, 4]),
        rollout([1], [2, 2], group=0, weight_versions=[0, 5], action_mask=[False, True]),
        rollout([1], [2], group=1, weight_versions=[1]),
        rollout([1], [2], group=1),
    ]
    stats = staleness_stats(rollouts, 6)
    assert stats["staleness_mean"] == pytest.approx((2 + 2 + 1 + 0 + 4) / 5)
    assert stats["staleness_max"] == 4
    assert stats["staleness_spread_max"] == 2
    fresh = staleness_stats(rollouts[2:3], 2)
    assert fresh == dict.fromkeys(("staleness_mean", "staleness_max", "staleness_spread_max"), 0)


def test_staleness_is_unknown_without_versions() -> None:
    observed = rollout([1], [2], weight_versions=[1], action_mask=[False])
    stats = staleness_stats([rollout([1], [2]), observed], 3)
    assert set(stats.values()) == {None}
    assert set(staleness_stats([], 3).values()) == {None}


def test_a_page_draws_every_stat_of_the_correction_and_of_staleness() -> None:
    drawn = {key for curve in LEARNING_CURVES for key in curve.keys}
    stats = {*importance_stats([], RLConfig()), *staleness_stats([], 1), "dropped_stale"}
    assert stats <= drawn
