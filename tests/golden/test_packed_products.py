"""Check that scores with oneDNN's packed products are upstream's, within float32's accuracy."""

from __future__ import annotations

import pytest
import torch

from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.scorers import SampleForScoring
from scorekit.server.settings import parse_settings
from services.metricx.model import MetricXBackend, MetricXQEScorer
from services.metricx.settings import MetricXSettings
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import loaded, score
from testing.servers import running_service
from tests.kits.comet import golden as comet_golden
from tests.kits.metricx_checkpoints import FLOAT32

#: Of scores between 0 and 1.
CLOSE = 1e-5
#: Every encoder and every kind of head.
COMET = ("comet_22", "older_qe", "ranking", "kiwi", "all_three_tags", "xcomet_mix", "xcomet_lite")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed_layers(network):
    return [module for module in network.modules() if type(module).__name__ == "PackedLinear"]


@pytest.mark.parametrize("matmul", ["torch", "onednn"])
@pytest.mark.parametrize("name", [*COMET, "demo"])
def test_comet_scores_are_upstreams(comet_folder, name, matmul):
    backend = loaded(comet_folder(name), matmul=matmul)
    assert bool(packed_layers(backend.comet.transformer)) == (matmul == "onednn")
    stored = zip(comet_golden.rows(name), comet_golden.read(name)["scores"], strict=True)
    expected = [(row, value) for row, value in stored if max(map(len, row.values())) < 500][::4]
    rows = [{"src": "", **row} for row, _ in expected]
    for sizes in ([1], [7]):
        for (row, value), result in zip(expected, score(backend, rows, sizes), strict=True):
            assert result.score == pytest.approx(value, abs=CLOSE), row


@pytest.mark.parametrize("matmul", ["torch", "onednn"])
def test_metricx_scores_are_upstreams(metricx_folder, metricx_golden, matmul):
    scorer = MetricXQEScorer(str(metricx_folder), device="cpu", threads=1, matmul=matmul)
    assert bool(packed_layers(scorer.backend._model)) == (matmul == "onednn")
    pairs = [pair for pair in metricx_golden["pairs"] if pair["qe_n_tokens"] < 500]
    samples = [SampleForScoring(pair["source"], pair["hypothesis"]) for pair in pairs]
    for batch_size in (1, 5):
        scores = scorer.score_batch(samples, {"batch_size": batch_size}).sequence_scores
        assert scores == pytest.approx([pair["qe"] for pair in pairs], abs=FLOAT32)


def test_services_say_who_multiplies_and_share_their_cache(metricx_folder, tmp_path):
    cache = f"sqlite:///{tmp_path}/scores.sqlite"
    for matmul, is_cached in (("torch", False), ("onednn", True)):
        backend = MetricXBackend(str(metricx_folder), device="cpu", threads=1, matmul=matmul)
        with running_service(backend, cache=cache) as url, SyncScoringClient(url) as client:
            assert client.info().matmul == matmul
            (result,) = client.score([{"src": "a house", "mt": "ein Haus"}])
            assert result.ok and result.cached == is_cached


def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(metricx_folder):
    def backend(*flags):
        flags = ["--model", str(metricx_folder), "--device", "cpu", *flags]
        return MetricXBackend.from_settings(parse_settings(MetricXSettings, flags))

    assert backend("--matmul", "onednn").load().matmul == "onednn"
    with pytest.raises(UserError, match=r"--matmul \(METRICX_MATMUL\): .*'onednn'"):
        backend("--matmul", "mkl")
    with pytest.raises(UserError, match="--matmul onednn: it is for float32"):
        backend("--matmul", "onednn", "--dtype", "bfloat16")


def test_the_networks_of_unbabel_comet_stay_as_they_are(comet_folder):
    folder = str(comet_folder("kiwi"))
    backend = XCometBackend(folder, implementation="unbabel-comet", matmul="onednn")
    with pytest.raises(UserError, match="--matmul onednn: it is for --implementation own"):
        backend.check()
