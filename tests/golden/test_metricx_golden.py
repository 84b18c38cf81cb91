"""Scores of the service against google-research/metricx's own code."""

from __future__ import annotations

import pytest
from scipy.stats import spearmanr

from scorekit.client import SyncScoringClient
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.scorers import SampleForScoring
from services.metricx.model import MetricXBackend, MetricXQEScorer
from tests.servers import running_service

TOLERANCE = 1e-4


def _samples(golden, mode):
    return [
        {"src": p["source"], "mt": p["hypothesis"]}
        | ({"ref": p["reference"]} if mode == "ref" else {})
        for p in golden["pairs"]
    ]


def _assert_golden(results, pairs, mode):
    for result, pair in zip(results, pairs, strict=True):
        assert result.ok, result
        assert result.score == pytest.approx(pair[mode], abs=TOLERANCE)
        assert result.tokens == pair[f"{mode}_n_tokens"]


@pytest.fixture(scope="module", params=[64, 8192], ids=lambda n: f"{n}_tokens_a_batch")
def service(request, metricx_folder):
    backend = MetricXBackend(str(metricx_folder), device="cpu", threads=1)
    with running_service(backend, max_batch_tokens=request.param) as url:
        yield url


def _usable(golden, mode):
    # Upstream writes an empty ` reference: ` where we, by contract, take "" for quality estimation.
    return [p for p in golden["pairs"] if mode == "qe" or p["reference"]]


@pytest.mark.parametrize("mode", ["qe", "ref"])
def test_scores_over_http_equal_upstream_whatever_the_batch(service, metricx_golden, mode):
    pairs = _usable(metricx_golden, mode)
    samples = _samples({"pairs": pairs}, mode)
    with SyncScoringClient(service) as client:
        _assert_golden(client.score(samples, options={"cache": False}), pairs, mode)
        odd = client.score(samples[::-2], options={"cache": False}, batch_size=3)
        _assert_golden(odd, pairs[::-2], mode)


def test_one_request_may_mix_both_modes(service, metricx_golden):
    pairs = _usable(metricx_golden, "ref")
    mixed = [
        s
        for both in zip(
            _samples({"pairs": pairs}, "qe"), _samples({"pairs": pairs}, "ref"), strict=True
        )
        for s in both
    ]
    with SyncScoringClient(service) as client:
        results = client.score(mixed, options={"cache": False})
    _assert_golden(results[::2], pairs, "qe")
    _assert_golden(results[1::2], pairs, "ref")


def test_the_scorer_in_process_equals_upstream_too(metricx_folder, metricx_golden):
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", threads=1)
    samples = [SampleForScoring(p["source"], p["hypothesis"]) for p in metricx_golden["pairs"]]
    _assert_golden(scorer.score_batch(samples).metadata, metricx_golden["pairs"], "qe")


def test_an_empty_reference_forced_on_the_model_is_upstream_s_too(metricx_folder, metricx_golden):
    """Over HTTP "" means quality estimation; upstream's reference mode appends the empty field."""
    backend = MetricXBackend(str(metricx_folder), device="cpu", threads=1)
    backend.load()
    pairs = [p for p in metricx_golden["pairs"] if not p["reference"]]
    assert pairs
    samples = [
        TranslationSample.model_construct(src=p["source"], mt=p["hypothesis"], ref="")
        for p in pairs
    ]
    encoded = backend.encode(samples, MetricXOptions())
    outcomes = backend.forward(encoded)
    for e, outcome, pair in zip(encoded, outcomes, pairs, strict=True):
        assert outcome["score"] == pytest.approx(pair["ref"], abs=TOLERANCE)
        assert e.fields["tokens"] == pair["ref_n_tokens"]


def test_bfloat16_ranks_like_float32(metricx_folder, metricx_golden):
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", dtype="bfloat16", threads=1)
    pairs = [p for p in metricx_golden["pairs"] if p["qe_n_tokens"] < 500]
    output = scorer.score_batch([SampleForScoring(p["source"], p["hypothesis"]) for p in pairs])
    rho = spearmanr(output.sequence_scores, [p["qe"] for p in pairs]).statistic
    assert rho > 0.95
