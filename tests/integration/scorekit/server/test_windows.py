"""Test `overlong: windows` over HTTP, with services that run the demo's models."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pandas as pd
import pytest

from scorekit.client import SyncScoringClient
from services.metricx.model import MetricXBackend
from services.xcomet.model import XCometBackend
from testing.servers import PATIENCE_S, running_service, wait_ready, wait_until
from tests.kits.batching import Gate

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "demo/models"


@pytest.fixture(scope="module", params=["xcomet", "metricx"])
def url(request):
    backend_class = {"xcomet": XCometBackend, "metricx": MetricXBackend}[request.param]
    backend = backend_class(str(MODELS / request.param), device="cpu", threads=1)
    with running_service(backend, cache="memory") as url:
        wait_ready(url)
        yield url


def _document(count):
    lines = (ROOT / "tests/data/prose/ko_en.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:count]]
    return {
        "src": "\n".join(row["en"] for row in rows),
        "mt": "\n".join(row["ko"] for row in rows),
        "ref": "\n".join(row["ko"].rstrip(".") + "요." for row in rows),
    }


def _post(url, samples, **options):
    body = {"samples": samples, "options": options}
    return httpx.post(f"{url}/v1/score", json=body, timeout=120).json()


def test_a_long_document_is_scored_whole(url):
    document = _document(20)
    for sample in ({k: document[k] for k in ("src", "mt")}, document):
        short = {k: text[:40] for k, text in sample.items()}
        results = _post(url, [sample, short], overlong="windows", cache=False)["results"]
        windowed, fits = results
        (cut,) = _post(url, [sample], cache=False)["results"]
        assert any(cut["truncated"].values()) and "windows" not in cut
        assert fits == _post(url, [short], cache=False)["results"][0] and "windows" not in fits
        assert not any(windowed["truncated"].values())
        assert windowed["mt_covered"] == len(sample["mt"])
        windows = windowed["windows"]
        assert len(windows) > 1 and windowed["tokens"] > cut["tokens"]
        assert windows[0]["src_start"] == 0 and windows[-1]["src_end"] == len(sample["src"])
        assert all(a["mt_end"] == b["mt_start"] for a, b in pairwise(windows))
        for span in windowed.get("error_spans", []):
            assert sample["mt"][span["start"] : span["end"]] == span["text"]


def test_sentences_that_fit_only_apart_are_scored_as_if_sent_apart(url):
    document = {k: text.splitlines()[6:8] for k, text in _document(8).items() if k != "ref"}
    alone = [
        dict(zip(document, pair, strict=True)) for pair in zip(*document.values(), strict=True)
    ]
    separate = _post(url, alone, cache=False)["results"]
    # MetricX's limit counts an end token that it drops.
    limit = max(result["tokens"] for result in separate) + 1
    both = {k: " ".join(texts) for k, texts in document.items()}
    (got,) = _post(url, [both], overlong="windows", max_input_length=limit, cache=False)["results"]
    assert [w["score"] for w in got["windows"]] == pytest.approx(
        [result["score"] for result in separate], abs=1e-4
    )
    assert got["tokens"] == sum(result["tokens"] for result in separate)


def test_the_cache_keeps_windows_apart_from_what_is_cut(url):
    sample = {k: text + " " for k, text in _document(12).items() if k != "ref"}
    first = _post(url, [sample], overlong="windows")["results"][0]
    repeated = _post(url, [sample], overlong="windows")["results"][0]
    assert not first["cached"] and repeated == first | {"cached": True}
    assert "windows" not in _post(url, [sample])["results"][0]


def test_our_client_reads_them(url):
    document = _document(12)
    with SyncScoringClient(url) as client:
        (result,) = client.score([document], {"overlong": "windows"})
        frame = pd.DataFrame([document, {"src": "a", "mt": "b", "ref": ""}])
        scored = client.score_frame(frame, options={"overlong": "windows"})
        assert "windows" not in client.score_frame(frame[1:])
    assert result.ok and len(result.windows) > 1
    windows = [window.model_dump() for window in result.windows]
    assert scored["windows"].tolist() == [windows, None]


def _scores(url, mt, **options):
    body = {"samples": [{"src": "a", "mt": mt}], "options": options}
    return httpx.post(f"{url}/v1/score", json=body, timeout=PATIENCE_S).json()["results"][0]


def _longest_wait(url):
    metrics_text = httpx.get(f"{url}/metrics").text
    return float(
        re.search(r'scorekit_longest_wait_seconds{line="small"} (\S+)', metrics_text).group(1)
    )


def test_one_word_does_not_wait_for_the_longest_document_and_readiness_says_what_waits():
    backend = Gate()
    backend.open(3)  # the warm-up
    service = running_service(backend, max_batch_tokens=512, unready_after=1e-6)
    with service as url, ThreadPoolExecutor(2) as pool:
        backend.texts.clear()
        ready = f"{url}/health/ready"
        long = pool.submit(_scores, url, "word. " * 16_000, overlong="windows")
        wait_until(lambda: backend.holds)
        assert httpx.get(ready).status_code == 200 and _longest_wait(url) == 0
        word = pool.submit(_scores, url, "word")
        wait_until(lambda: _longest_wait(url) > 0)
        refused = httpx.get(ready)
        assert refused.status_code == 503 and "a small request has waited" in refused.text
        while not word.done() and len(backend.texts) < 20:
            count = len(backend.texts)
            backend.open(1)
            wait_until(lambda count=count: len(backend.texts) > count)
            wait_until(lambda: backend.holds or word.done())
        assert "score" in word.result() and not long.done()
        assert httpx.get(ready).status_code == 200 and _longest_wait(url) == 0
        backend.open(1000)
        assert len(long.result()["windows"]) > 25
