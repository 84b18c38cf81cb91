"""Test `empty_ref`, the meaning of an empty reference, over HTTP with the demo's xCOMET.

With `text` a sample has the score that unbabel-comet gives it (`tests/golden/comet`)."""

from __future__ import annotations

import json

import httpx
import pytest

from scorekit.client import SyncScoringClient
from scorekit.scorers import SampleForScoring
from services.xcomet.model import XCometBackend
from testing.servers import running_service, wait_ready
from tests.kits.comet import golden as comet_golden

#: float32 against upstream in float64.
FLOAT32 = 1e-5
EMPTY = {
    json.dumps(row): score
    for row, score in zip(
        comet_golden.rows("demo"), comet_golden.read("demo")["scores"], strict=True
    )
    if row.get("ref") == ""
}
ROWS = [json.loads(row) for row in EMPTY]


@pytest.fixture(scope="module")
def url():
    backend = XCometBackend(str(comet_golden.DEMO), device="cpu", threads=1)
    with running_service(backend, cache="memory") as url:
        wait_ready(url)
        yield url


def _post(url, samples, **options):
    body = {"samples": samples, "options": options}
    answer = httpx.post(f"{url}/v1/score", json=body, timeout=180)
    return answer.json()["results"]


def test_as_a_text_it_scores_as_upstream(url):
    for path in ("cold", "from the cache"):
        scores = [result["score"] for result in _post(url, ROWS, empty_ref="text")]
        assert scores == pytest.approx(list(EMPTY.values()), abs=FLOAT32), path


def test_by_default_it_is_none(url):
    plain = [{k: row[k] for k in ("src", "mt")} for row in ROWS]
    scores = [result["score"] for result in _post(url, plain)]
    assert [result["score"] for result in _post(url, ROWS)] == scores
    assert [result["score"] for result in _post(url, ROWS, empty_ref="none")] == scores
    differences = [abs(a - b) for a, b in zip(scores, EMPTY.values(), strict=True)]
    assert max(differences) > 100 * FLOAT32
    # An absent reference stays absent for every `empty_ref`.
    repeated = [result["score"] for result in _post(url, plain, empty_ref="text")]
    assert repeated == scores


def test_the_client_sends_it_as_it_was_given(url):
    options = {"empty_ref": "text"}
    with SyncScoringClient(url) as client:
        rows = client.score(ROWS, options)
        client_results = client.score([SampleForScoring(**row) for row in ROWS], options)
        mixed = client.score([{**ROWS[0], "ref": None}, ROWS[0]], options)
    assert [r.score for r in rows] == pytest.approx(list(EMPTY.values()), abs=FLOAT32)
    assert [r.score for r in client_results] == [r.score for r in rows]
    assert mixed[0].score != mixed[1].score


def test_in_windows_each_has_the_empty_reference(url):
    """Check three passes for each window: the scores equal those of the windows sent separately."""
    long = {name: " ".join(row[name] for row in ROWS * 3) for name in ("src", "mt")}
    options = {"overlong": "windows", "max_input_length": 128, "cache": False}
    (without,) = _post(url, [{**long, "ref": ""}], **options)
    (empty,) = _post(url, [{**long, "ref": ""}], empty_ref="text", **options)
    assert len(empty["windows"]) > 1 and empty["tokens"] > 2 * without["tokens"]
    alone = [
        {
            "src": long["src"][w["src_start"] : w["src_end"]].strip(),
            "mt": long["mt"][w["mt_start"] : w["mt_end"]].strip(),
            "ref": "",
        }
        for w in empty["windows"]
    ]
    # A window may include context: a window without context has its own score.
    scores = [r["score"] for r in _post(url, alone, empty_ref="text", cache=False)]
    same = [
        window["score"] == pytest.approx(score, abs=FLOAT32)
        for window, score in zip(empty["windows"], scores, strict=True)
    ]
    assert any(same)
    (short,) = _post(url, ROWS[:1], empty_ref="text", **options)
    assert "windows" not in short
    assert short["score"] == pytest.approx(EMPTY[json.dumps(ROWS[0])], abs=FLOAT32)
