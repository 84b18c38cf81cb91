"""The figures of a batch."""

from __future__ import annotations

import math

import pytest

from tests.kits.trainer.runs import rollout
from trainer.rl.config import RLConfig
from trainer.runs.rollout_figures import importance_figures


def test_the_samplers_gap_and_the_weights_that_correct_for_it() -> None:
    rollouts = [
        rollout([1], [2, 3], old_logprobs=[-1.0, -2.0], sampler_logprobs=[-1.5, -2.0]),
        rollout([1], [2], old_logprobs=[-1.0], sampler_logprobs=[-4.0]),
    ]
    figures = importance_figures(rollouts, RLConfig(importance_cap=2.0))
    assert figures["sampler_gap_mean"] == pytest.approx(3.5 / 3)
    assert figures["sampler_gap_max"] == pytest.approx(3.0)
    assert figures["importance_weight_mean"] == pytest.approx((math.exp(0.5) + 1 + 2) / 3)
    assert figures["importance_capped_frac"] == pytest.approx(1 / 3)


def test_without_a_correction_there_are_none() -> None:
    figures = importance_figures([rollout([1], [2], old_logprobs=[-1.0])], RLConfig())
    assert set(figures.values()) == {None}
