"""Compare scores of the service with google-research/metricx's own code.

In float64 only an error is larger than `CLOSE`; float32 is what is served."""

from __future__ import annotations

from itertools import pairwise

import pytest
from scipy.stats import spearmanr

from scorekit.client import SyncScoringClient
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.scorers import SampleForScoring
from services.metricx.model import MetricXBackend, MetricXQEScorer
from testing.servers import running_service
from tests.kits.float64 import CLOSE, float64
from tests.kits.metricx_checkpoints import FLOAT32


def _samples(golden, mode):
    return [
        {"src": p["source"], "mt": p["hypothesis"]}
        | ({"ref": p["reference"]} if mode == "ref" else {})
        for p in golden["pairs"]
    ]


def _assert_golden(results, pairs, mode):
    for result, pair in zip(results, pairs, strict=True):
        assert result.ok, result
        assert result.score == pytest.approx(pair[mode], abs=FLOAT32)
        assert result.tokens == pair[f"{mode}_n_tokens"]


@pytest.fixture(scope="module")
def exact(metricx_folder):
    """Return the backend in float64."""
    backend = MetricXBackend(str(metricx_folder), device="cpu", threads=1)
    backend.load()
    backend._model.double()
    return backend


def test_scores_equal_upstream_in_float64_whatever_the_batch(exact, metricx_golden):
    """Score both modes, long and short, mixed in batches of three, and alone.

    An empty reference is upstream's, too. Over HTTP "" means quality estimation, but upstream's
    reference mode appends the empty field."""
    cases = [(pair, mode) for pair in metricx_golden["pairs"] for mode in ("qe", "ref")]
    samples = [
        TranslationSample.model_construct(
            src=pair["source"],
            mt=pair["hypothesis"],
            ref=pair["reference"] if mode == "ref" else None,
        )
        for pair, mode in cases
    ]
    encoded = exact.encode(samples, MetricXOptions())
    with float64():
        starts = [n for n in range(len(encoded)) if n % 4 in (0, 3)]
        batches = [encoded[a:b] for a, b in pairwise([*starts, len(encoded)])]
        outcomes = [outcome for batch in batches for outcome in exact.forward(batch)]
    for e, outcome, (pair, mode) in zip(encoded, outcomes, cases, strict=True):
        assert outcome["score"] == pytest.approx(pair[mode], rel=0, abs=CLOSE)
        assert e.fields["tokens"] == pair[f"{mode}_n_tokens"]


@pytest.fixture(scope="module")
def backend(metricx_folder):
    return MetricXBackend(str(metricx_folder), device="cpu", threads=1)


@pytest.fixture(scope="module")
def service(backend):
    """Return the URL of a service with small batches."""
    with running_service(backend, max_batch_tokens=64) as url:
        yield url


@pytest.fixture(scope="module")
def service_of_large_batches(backend):
    with running_service(backend, max_batch_tokens=8192) as url:
        yield url


def _usable(golden, mode):
    """Return pairs that a request can send, one of them past the limit.

    Upstream writes an empty ` reference: `; our contract reads "" as quality estimation.
    """
    pairs = [p for p in golden["pairs"] if mode == "qe" or p["reference"]]
    long = [p for p in pairs if p["qe_n_tokens"] > 1000]
    assert len(long) == 3  # the tests in this process score all of them
    return [p for p in pairs if p not in long[1:]]


@pytest.mark.parametrize("mode", ["qe", "ref"])
def test_scores_over_http_equal_upstream_whatever_the_batch(
    service, service_of_large_batches, metricx_golden, mode
):
    pairs = _usable(metricx_golden, mode)
    samples = _samples({"pairs": pairs}, mode)
    with SyncScoringClient(service) as client:
        _assert_golden(client.score(samples, options={"cache": False}), pairs, mode)
    with SyncScoringClient(service_of_large_batches) as client:
        odd = client.score(samples[::-2], options={"cache": False}, batch_size=3)
        _assert_golden(odd, pairs[::-2], mode)


def test_one_request_may_mix_both_modes(service_of_large_batches, metricx_golden):
    pairs = _usable(metricx_golden, "ref")[::2]
    mixed = [
        s
        for both in zip(
            _samples({"pairs": pairs}, "qe"), _samples({"pairs": pairs}, "ref"), strict=True
        )
        for s in both
    ]
    with SyncScoringClient(service_of_large_batches) as client:
        results = client.score(mixed, options={"cache": False})
    _assert_golden(results[::2], pairs, "qe")
    _assert_golden(results[1::2], pairs, "ref")


def test_the_scorer_in_process_equals_upstream_too(metricx_folder, metricx_golden):
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", threads=1)
    samples = [SampleForScoring(p["source"], p["hypothesis"]) for p in metricx_golden["pairs"]]
    _assert_golden(scorer.score_batch(samples).metadata, metricx_golden["pairs"], "qe")


def test_bfloat16_ranks_like_float32(metricx_folder, metricx_golden):
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", dtype="bfloat16", threads=1)
    pairs = [p for p in metricx_golden["pairs"] if p["qe_n_tokens"] < 500]
    output = scorer.score_batch([SampleForScoring(p["source"], p["hypothesis"]) for p in pairs])
    rho = spearmanr(output.sequence_scores, [p["qe"] for p in pairs]).statistic
    assert rho > 0.95
