"""Check that services log and count the inputs that they cut, without their texts."""

from __future__ import annotations

import gc
import logging
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from scorekit.client import Embeddings, SyncScoringClient
from scorekit.server.fake import MAX_INPUT_LENGTH, FakeBackend
from scorekit.server.local import LocalScorer
from services.embedder.model import EmbedderBackend
from services.metricx.model import MetricXBackend, MetricXQEScorer
from services.xcomet.model import XCometBackend
from testing.checkpoints.embedder import make_folder
from testing.servers import running_service
from tests.kits.comet import golden as comet_golden

SECRET = "confidential"
LONG = f"{SECRET} " * 80
#: A limit that LONG exceeds, and that costs little.
LIMIT = {"max_input_length": 64}


def truncated(url: str) -> dict[str, float]:
    """Return the values of `scorekit_truncated_total` by field."""
    prefix = 'scorekit_truncated_total{field="'
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = [line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix)]
    return {field: float(value) for field, value in pairs}


def events(logs: list[Any]) -> list[Any]:
    assert SECRET not in repr(logs)
    return [entry for entry in logs if entry["event"] == "overlong_inputs"]


@pytest.mark.parametrize("service", ["metricx", "xcomet"])
def test_cut_texts_are_counted_and_logged_without_the_text(
    service: str, metricx_folder: Any
) -> None:
    backend = (
        MetricXBackend(str(metricx_folder), device="cpu", threads=1)
        if service == "metricx"
        else XCometBackend(str(comet_golden.DEMO), device="cpu", threads=1)
    )
    samples = [{"src": LONG, "mt": f"{SECRET} {n}"} for n in range(3)] + [{"src": "a", "mt": "b"}]
    with capture_logs() as logs, running_service(backend, max_batch_tokens=2048) as url:
        assert truncated(url) == {"src": 0, "mt": 0, "ref": 0}  # the warm-up is nobody's input
        with SyncScoringClient(url) as client:
            results = client.score(samples, LIMIT)
            assert [result.truncated.src for result in results] == [True, True, True, False]
            cut = {
                field: float(sum(bool(getattr(result.truncated, field)) for result in results))
                for field in ("src", "mt", "ref")
            }
            assert truncated(url) == cut
            client.score(samples, LIMIT)  # from the cache
            assert truncated(url) == cut
            client.score([{"src": LONG, "mt": "c"}], LIMIT | {"overlong": "error"})
            assert truncated(url) == cut
    first, last = events(logs)
    assert (first["service"], first["cut"], first["refused"]) == (service, 3, 0)
    assert first["cut_texts"]["src"] == 3 and first["log_level"] == "warning"
    assert (last["cut"], last["refused"], last["cut_texts"]) == (0, 1, {})  # at the end


def test_windows_cut_nothing() -> None:
    text = "word. " * (MAX_INPUT_LENGTH * 2)
    with capture_logs() as logs, running_service(FakeBackend()) as url:
        with SyncScoringClient(url) as client:
            (result,) = client.score([{"src": text, "mt": text}], {"overlong": "windows"})
        assert len(result.windows) > 1
        assert truncated(url) == {"src": 0, "mt": 0, "ref": 0}
    assert events(logs) == []


def test_the_embedder_counts_its_inputs(tmp_path: Any) -> None:
    folder = make_folder(tmp_path / "model", pooling="mean")
    backend = EmbedderBackend(str(folder), device="cpu", threads=1)
    with capture_logs() as logs, running_service(backend, max_batch_tokens=2048) as url:
        assert truncated(url) == {"input": 0}
        body = {"input": [LONG, "short"], "truncate": True}
        assert httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).status_code == 200
        assert truncated(url) == {"input": 1}
        with Embeddings(url) as embedder:
            refused, _ = embedder.embed([LONG + "x", "short"])
        assert refused.type == "overlong"
        assert truncated(url) == {"input": 1}
    first, last = events(logs)
    assert (first["service"], first["cut"], first["cut_texts"]) == ("embedder", 1, {"input": 1})
    assert (last["cut"], last["refused"]) == (0, 1)


def test_a_scorer_in_this_process_logs_it_too(
    metricx_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for scorer in (
        MetricXQEScorer(str(metricx_folder), device="cpu", threads=1),
        LocalScorer(FakeBackend()),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "scorekit.server.local"):
            for _ in range(3):  # at most one line a minute
                samples = [{"src": LONG, "mt": "a"}, {"src": "a", "mt": "b"}]
                scorer.score_batch(samples, LIMIT)
        (record,) = caplog.records
        assert record.getMessage().startswith("metricx: samples over the limit of tokens")
        assert ": 1 cut (" in record.getMessage() and "src: 1" in record.getMessage()
        assert "0 refused" in record.getMessage() and SECRET not in record.getMessage()


def test_a_scorer_that_ends_logs_the_texts_that_no_line_has_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = LocalScorer(FakeBackend())
    with caplog.at_level(logging.WARNING, "scorekit.server.local"):
        for _ in range(3):
            scorer.score_batch([{"src": LONG, "mt": "a"}], LIMIT)
        del scorer
        gc.collect()
    first, last = (record.getMessage() for record in caplog.records)
    assert ": 1 cut (" in first and ": 2 cut (" in last
