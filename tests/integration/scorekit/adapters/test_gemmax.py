"""Test the adapter for gemmax with requests that its client has sent, and with the client."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from scorekit.adapters.gemmax import GemmaxServer, Service, create_app
from scorekit.adapters.gemmax import app as command
from scorekit.client import ScoringClient
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.rules import load_gate
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score, fake_spans
from testing.servers import JSON, free_port, running_app, running_service, wait_until
from tests.kits import forked
from tests.kits.trainer.sick_services import sick_service
from tests.kits.unwritable import Pipeline

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[3] / "data/gemmax/requests.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
KEY = "s3cret"
#: The keys of a result that the client reads.
READ = {
    "/score": {"score", "error_spans"},
    "/score_openlid": {"qe", "la_ok", "la_skip", "pred_iso", "tgt_iso"},
}
SRC = "We walked along the river."
GERMAN = "Gestern Abend gingen wir lange am Fluss entlang und aßen auf dem Heimweg warme Nudeln."
#: The client's folder scripts/rl/rewards in a checkout of gemmax.
CLIENT = os.environ.get("GEMMAX_REWARDS", "")
with_client = pytest.mark.skipif(
    not CLIENT, reason="GEMMAX_REWARDS names no folder scripts/rl/rewards of gemmax"
)


class Options(FakeBackend):
    """Remembers the options of the requests."""

    def __init__(self):
        super().__init__("xcomet")
        self.options = []

    def encode(self, samples, options):
        self.options.append(options)
        return super().encode(samples, options)


@pytest.fixture(scope="module")
def xcomet():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


@contextlib.contextmanager
def served(xcomet, qe=None, keys=(), deadline_s=20.0):
    """Serve the adapter; its clients use uvicorn's loop. Yield its URL and its requests' paths."""
    rule = load_gate("language", LanguageGate(rule="language", unknown="pass"))
    apps, paths = [], []

    async def app(scope, receive, send):
        if not apps:
            services = []
            for url in (xcomet, qe or xcomet):
                client = ScoringClient(url, deadline_s=20.0)
                services.append(Service(client, await client.limits()))
            apps.append(create_app(GemmaxServer(services[1], services[0], rule, deadline_s), keys))
        if scope["type"] == "http" and scope["method"] == "POST":
            paths.append(scope["path"])
        await apps[0](scope, receive, send)

    with running_app(app) as url:
        wait_until(lambda: answers(f"{url}/health"))
        yield url, paths


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200


def score(src, mt, ref=None):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 1.0)


def post(url, *mts, path="/score"):
    items = [{"src": SRC, "mt": mt, "tgt_lang": "German"} for mt in mts]
    return httpx.post(f"{url}{path}", json={"items": items}, timeout=60)


# -- recorded requests ----------------------------------------------------------------------------


def test_recorded_requests_get_all_that_the_client_reads(xcomet):
    with served(xcomet) as (url, _):
        for request in RECORDED:
            path, items = request["path"], request["body"]["items"]
            results = httpx.post(f"{url}{path}", json=request["body"]).json()["results"]
            assert len(results) == len(items)
            for item, result in zip(items, results, strict=True):
                assert READ[path] <= result.keys()
                number = result["qe" if path == "/score_openlid" else "score"]
                # White space is as it was sent.
                assert number == score(item["src"], item["mt"], item.get("ref"))
                assert len(result["error_spans"]) == len(fake_spans(item["mt"]))


def test_the_language_is_checked_for_each_item(xcomet):
    recorded = next(r for r in RECORDED if r["path"] == "/score_openlid")
    with served(xcomet) as (url, _):
        results = httpx.post(f"{url}/score_openlid", json=recorded["body"]).json()["results"]
    names = [item["tgt_lang"] for item in recorded["body"]["items"]]
    checks = [(result["la_ok"], result["la_skip"]) for result in results]
    # Korean, German text, a short text, no text, an unknown language, a short text, German
    assert names[0] == names[1] == names[3] == "Korean" and names[4] == "Elvish"
    assert checks == [(1, 0), (0, 0), (1, 1), (0, 0), (1, 1), (1, 1), (1, 0)]
    assert results[0] | {"wa": 0.0, "wa_precision": 0.0, "wa_recall": 0.0} == results[0]


def test_spans_are_written_as_the_client_s_own_server_does(xcomet):
    with served(xcomet) as (url, _):
        (result,) = post(url, "그 집은 red 이다.").json()["results"]
    (span,) = result["error_spans"]
    assert span == {"text": "red", "confidence": 2 / 3, "severity": "minor", "start": 5, "end": 8}


def test_an_empty_reference_is_a_text_as_for_unbabel_comet():
    backend = Options()
    with running_service(backend) as service, served(service) as (url, _):
        backend.options.clear()
        assert post(url, "가").status_code == 200
    assert [(o.empty_ref, o.overlong) for o in backend.options] == [("text", "truncate")]


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["nan", "refused"])
def test_an_item_without_a_score_fails_its_request_and_no_other(failure):
    with (
        sick_service(failure, lambda sample: sample.mt == "bad") as (_, service),
        served(service) as (url, _),
    ):
        for path in READ:
            bad, good = post(url, "good", "bad", path=path), post(url, "good", path=path)
            assert (bad.status_code, good.status_code) == (502, 200)
            assert "results" not in bad.json() and "\n" not in bad.json()["error"]["message"]


def test_a_service_that_hangs_is_a_504_before_the_client_gives_up():
    with (
        sick_service("hang", lambda sample: sample.mt == "bad") as (_, service),
        served(service, deadline_s=0.5) as (url, _),
    ):
        for path in READ:
            bad = post(url, "bad", path=path)
            assert bad.status_code == 504 and "results" not in bad.json()


BIG = "x" * 100_001
#: Body -> a part of the message; all are refused with 422.
HOSTILE = {
    "no JSON": (b"items", "body: Invalid JSON"),
    "nothing": (b"", "body: Invalid JSON"),
    "a list": (b"[]", "body: "),
    "no items": (b"{}", "items: Field required"),
    "one item": (b'{"items": {"src": "a", "mt": "b"}}', "items: "),
    "null": (b'{"items": [null]}', "items.0: "),
    "no mt": (b'{"items": [{"src": "a"}]}', "items.0.mt: Field required"),
    "a number": (b'{"items": [{"src": "a", "mt": 5}]}', "items.0.mt: "),
    "half a character": (b'{"items": [{"src": "a", "mt": "\\ud800"}]}', "body: Invalid JSON"),
    "not UTF-8": (b'{"items": [{"src": "a", "mt": "\xff"}]}', "body: Invalid JSON"),
    "deep": (b'{"items": ' + b"[" * 100_000, "body: Invalid JSON"),
    "long": (json.dumps({"items": [{"src": "a", "mt": BIG}]}).encode(), "items.0.mt: "),
    "many": (json.dumps({"items": [{"src": "a", "mt": "b"}] * 10_001}).encode(), "items: "),
}


@pytest.fixture(scope="module")
def adapter(xcomet):
    with served(xcomet) as (url, _):
        yield url


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("case", HOSTILE)
def test_another_body_is_refused_in_one_line(adapter, case, path):
    body, message = HOSTILE[case]
    response = httpx.post(f"{adapter}{path}", content=body, headers=JSON)
    assert response.status_code == 422
    assert response.json()["error"]["message"].startswith(message)
    assert "\n" not in response.json()["error"]["message"]


def test_a_body_that_is_too_large_is_not_read_on(adapter):
    def parts():
        for _ in range(64):
            yield b" " * 2**20

    with contextlib.suppress(httpx.WriteError):  # the server may close before all is sent
        response = httpx.post(f"{adapter}/score", content=parts(), headers=JSON, timeout=60)
        assert response.status_code == 413
    assert post(adapter, "가").status_code == 200


def test_nothing_asked_is_nothing_answered_and_other_paths_are_not_there(adapter):
    assert post(adapter).json() == {"results": []}
    assert post(adapter, path="/score/").status_code == 404
    assert httpx.get(f"{adapter}/score").status_code == 405
    health = httpx.get(f"{adapter}/health").json()
    assert health["ok"] and health["openlid"] and health["models"]["score"] == "fake-xcomet"


def test_a_key_is_wanted_as_the_client_sends_it(xcomet):
    password = next(r["authorization"] for r in RECORDED if r["authorization"])
    with served(xcomet, keys=["other", KEY]) as (url, _):
        for header, status in (
            (password, 200),
            (f"Bearer {KEY}", 200),
            ("Bearer s3cre", 401),
            (f"Bearer {KEY}é", 401),
            ("Basic ???", 401),
            ("Basic", 401),
            ("", 401),
        ):
            headers = {"Authorization": header.encode()} if header else {}
            response = httpx.post(f"{url}/score", json={"items": []}, headers=headers)
            assert response.status_code == status, header
        assert httpx.get(f"{url}/health").status_code == 200


# -- the process ----------------------------------------------------------------------------------


def test_the_process_serves_both_routes_from_two_services(xcomet):
    port = free_port()
    with running_service(Options()) as qe:
        words = ["-m", "scorekit.adapters.gemmax", "--xcomet", xcomet, "--qe", qe]
        words += ["--port", str(port)]
        child = forked.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: child.poll() is not None or answers(f"{url}/health"))
            (checked,) = post(url, GERMAN, path="/score_openlid").json()["results"]
            (scored,) = post(url, GERMAN).json()["results"]
        finally:
            child.terminate()
            complaint = child.communicate(timeout=180)[1]
    assert checked["qe"] == scored["score"] == score(SRC, GERMAN) and checked["la_ok"] == 1
    assert "scores for gemmax: http" in complaint and "Traceback" not in complaint


def test_ctrl_c_ends_the_server_behind_tee(xcomet, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "scorekit.adapters.gemmax", "--qe", xcomet]
    with Pipeline([*command, "--port", str(port)], tmp_path) as pipeline:
        wait_until(lambda: pipeline.has_ended or answers(f"http://127.0.0.1:{port}/health"))
        assert pipeline.interrupt() == 0
        assert "scores for gemmax: http" in pipeline.log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--xcomet and --qe: give one of them"),
        (["--qe", "{xcomet}", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached by others"),
        (["--qe", "{xcomet}", "--api-keys-file", "{empty}"], "no key in it"),
        (["--qe", "{xcomet}", "--api-keys-file", "gone"], "gone: No such file"),
        (["--xcomet", "{xcomet}", "--language-model", "gone.bin"], "gone.bin: this file does not"),
        (["--xcomet", "{xcomet}", "--min-probability", "7"], "min_probability: "),
        (["--xcomet", "{metricx}"], "is no model of the COMET family"),
        (["--qe", "{away}", "--wait", "0.2"], "not ready"),
    ],
)
def test_a_mistake_is_one_line(xcomet, metricx, tmp_path, options, message):
    (tmp_path / "keys").write_text("\n")
    words = {
        "{xcomet}": xcomet,
        "{metricx}": metricx,
        "{empty}": str(tmp_path / "keys"),
        "{away}": f"http://127.0.0.1:{free_port()}",
    }
    done = CliRunner().invoke(command, [words.get(option, option) for option in options])
    assert done.exit_code == (1 if "{away}" in options else 2)
    assert message in done.stderr and done.stderr.count("\n") == 1


# -- the client itself ----------------------------------------------------------------------------


@pytest.fixture
def client(monkeypatch):
    monkeypatch.syspath_prepend(CLIENT)
    return importlib.import_module("mt_dual_comet_reward").compute_score


@with_client
def test_the_client_s_reward_is_the_mean_of_two_services(client, xcomet):
    with sick_service("") as (_, qe), served(xcomet, qe, keys=[KEY]) as (url, paths):
        url = url.replace("http://", f"http://gemmax:{KEY}@")
        rewards = client(
            solution_strs=[f"{GERMAN}<eos>", f" {GERMAN}\n", GERMAN],
            extra_infos=[
                {"source": SRC, "target_language": name} for name in ("German", "Elvish", "Korean")
            ],
            xcomet_urls=f"{url}/score_openlid",
            cometkiwi_urls=f"{url}/score",
            la_fail_score=-0.5,
            retries=0,
        )
    with_space = score(SRC, f" {GERMAN}\n")
    assert [r["score"] for r in rewards] == [score(SRC, GERMAN), with_space, -0.5]
    assert [r["la_ok"] for r in rewards] == [1.0, 1.0, 0.0]
    assert [r["la_skip"] for r in rewards] == [0.0, 1.0, 0.0]
    assert sorted(paths) == ["/score", "/score_openlid"]


@with_client
def test_the_client_raises_and_never_sees_a_number_that_is_none(client):
    with (
        sick_service("nan", lambda sample: sample.mt == "bad") as (_, service),
        served(service) as (url, paths),
    ):
        with pytest.raises(RuntimeError, match="failed after 2 attempt"):
            client(
                solution_strs=["good", "bad"],
                extra_infos=[{"source": SRC, "target_language": "German"}] * 2,
                xcomet_urls=f"{url}/score_openlid",
                cometkiwi_urls=f"{url}/score",
                retries=1,
            )
    assert sorted(paths) == ["/score"] * 2 + ["/score_openlid"] * 2
