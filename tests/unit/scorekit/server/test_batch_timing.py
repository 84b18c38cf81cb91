"""Check the predicted time of a batch and when it counts as stalled."""

from __future__ import annotations

import pytest

from scorekit.server import batches as module
from scorekit.server.batches import BatchTimeModel


def fitted_model(line, sizes):
    timing = BatchTimeModel(None)
    for tokens in sizes:
        timing.observe(tokens, 1, line(tokens))
    return timing


def test_it_finds_the_line_of_cost_over_tokens():
    timing = fitted_model(lambda n: 0.01 + 1e-4 * n, [100, 300, 50, 900, 500])
    for tokens in (10, 400, 16_384):
        assert timing.predict(tokens) == pytest.approx(0.01 + 1e-4 * tokens, rel=1e-6)


def test_batches_of_one_size_make_a_larger_one_take_in_proportion():
    timing = fitted_model(lambda n: 2.0, [1000] * 5)
    assert timing.predict(1000) == pytest.approx(2.0)
    assert timing.predict(4000) == pytest.approx(8.0)
    assert timing.predict(10) == pytest.approx(2.0)


def test_a_prediction_is_never_negative_and_old_batches_are_forgotten():
    timing = fitted_model(lambda n: 1e-3 * n, [1000, 900, 1100])
    assert timing.predict(1) > 0
    for tokens in (1000, 500, 100) * 100:
        timing.observe(tokens, 1, 1e-4 * tokens)
    assert timing.predict(1000) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("stall_after", "predicted", "limit"), [(None, 0.2, 5.0), (None, 60.0, 300.0), (0.5, 60.0, 0.5)]
)
def test_a_batch_hangs_after_five_seconds_or_five_times_its_prediction(
    monkeypatch, stall_after, predicted, limit
):
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    timing = BatchTimeModel(stall_after)
    timing.observe(100, 1, predicted)
    assert not timing.is_stalled()
    timing.begin(100)
    clock[0] += limit - 0.01
    assert not timing.is_stalled()
    clock[0] += 0.02
    assert timing.is_stalled()
    timing.end()
    assert not timing.is_stalled()


def test_the_rate_is_samples_a_second():
    timing = BatchTimeModel(None)
    timing.observe(100, 64, 0.5)
    assert timing.samples_per_s == pytest.approx(128.0)
