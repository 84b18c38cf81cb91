"""Test the page at `/` as a document: access, headers, and contents that it must not have."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode

import httpx
import pytest
from pydantic import SecretStr

from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.page import make_page
from scorekit.server.settings import Secrets, ServiceSettings, parse_settings
from services.judge.model import RulesBackend
from services.judge.rubrics import load_rubrics
from testing.fake_embedder import FakeEmbedder
from testing.servers import running_service

KINDS = ("translations", "judge", "embedder", "retriever", "reward")


@pytest.fixture(scope="module")
def closed():
    """Yield a service that requires a key."""
    with running_service(FakeBackend("xcomet"), Secrets(api_keys=SecretStr("secret"))) as url:
        yield url


def hash_of(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_runs_its_own_script_and_loads_nothing(kind):
    body, headers = make_page(kind, "<service>")
    page = body.decode()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (policy["script-src"], policy["style-src"]) == (hash_of(script), hash_of(style))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//|\son\w+=""", page)
    assert not re.search(r"@import|url\(", style)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert "<service>" not in page and "&lt;service&gt;" in page
    assert not re.search("@[A-Z]+@", page)


def test_the_page_needs_no_key_and_all_else_does(closed):
    got, head = httpx.get(f"{closed}/"), httpx.head(f"{closed}/")
    assert got.status_code == head.status_code == 200
    assert head.headers["content-length"] == f"{len(got.content)}" and not head.content
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    assert "fake-xcomet" not in got.text and "secret" not in got.text  # a page without data
    for path in ("//", "/?a=b/../v1/info", "/index.html", "/v1/info", "/metrics", "/openapi.json"):
        status = httpx.get(f"{closed}{path}").status_code
        assert status == (200 if path.startswith("/?") else 401), path
    assert httpx.post(f"{closed}/", json={}).status_code == 401
    assert httpx.request("OPTIONS", f"{closed}/").status_code == 401
    with_key = {"Authorization": "Bearer secret"}
    assert httpx.post(f"{closed}/", json={}, headers=with_key).status_code == 405


def test_behind_a_prefix_it_is_the_page_of_that_prefix():
    app = create_app(
        FakeBackend(), ServiceSettings(cache="memory"), Secrets(api_keys=SecretStr("secret"))
    )

    async def statuses(*paths: str) -> list[int]:
        transport = httpx.ASGITransport(app, root_path="/metricx")
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(statuses("/metricx/", "/metricx/v1/info")) == [200, 401]


def test_it_is_sent_again_when_it_is_another_one(closed):
    tag = httpx.get(f"{closed}/").headers["etag"]
    for etag_header in (tag, f"W/{tag}", f'"other", {tag}'):
        got = httpx.get(f"{closed}/", headers={"If-None-Match": etag_header})
        assert (got.status_code, got.content, got.headers["etag"]) == (304, b"", tag)
    assert httpx.get(f"{closed}/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_no_page_means_none(monkeypatch):
    assert parse_settings(ServiceSettings, []).page
    assert not parse_settings(ServiceSettings, ["--no-page"]).page
    monkeypatch.setenv("SCOREKIT_SERVICE_PAGE", "false")
    assert not parse_settings(ServiceSettings, []).page
    monkeypatch.undo()
    with running_service(FakeBackend("xcomet"), page=False) as url:
        assert httpx.get(f"{url}/").json()["error"]["type"] == "not_found"
    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("secret")), page=False) as url:
        assert httpx.get(f"{url}/").status_code == 401


@pytest.mark.parametrize(
    ("backend", "expected_text"),
    [
        (lambda: FakeBackend("metricx"), "What to score"),
        (lambda: RulesBackend(load_rubrics(None), 1000), "Task (rubric)"),
        (lambda: FakeEmbedder(8, 16), "Second text"),
    ],
    ids=["metricx", "judge", "embedder"],
)
def test_each_service_has_the_page_of_its_kind(backend, expected_text):
    with running_service(backend()) as url:
        assert expected_text in httpx.get(f"{url}/").text
        assert "/" not in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_rows_are_read_under_the_same_key_and_limits(closed):
    key = {"Authorization": "Bearer secret"}
    body = {"name": "", "text": "id\tsrc\tmt\nx\ta\tb\n"}
    url = f"{closed}/page/rows"
    assert httpx.post(url, json=body).status_code == 401
    answer = httpx.post(url, json=body, headers=key).json()
    assert answer["rows"] == [{"line": 2, "id": "x", "sample": {"src": "a", "mt": "b"}}]
    for value, status in (
        (
            {"base64": b64encode("src\tmt\n가\t나\n".encode("utf-16")).decode(), "name": "a.tsv"},
            200,
        ),
        ({"base64": "no base64!"}, 422),
        ({"text": 5}, 422),
        ({"rows": "x"}, 422),
        ([], 422),
        ({"text": "x" * 2**20}, 413),
    ):
        assert httpx.post(url, json=value, headers=key).status_code == status, str(value)[:40]
    plain = {**key, "Content-Type": "text/plain"}
    assert httpx.post(url, content=b"{}", headers=plain).status_code == 415
    assert httpx.get(url, headers=key).status_code == 405


def test_a_column_of_the_rows_can_be_named_or_left_out():
    with running_service(FakeBackend("xcomet")) as url:
        body = {"text": "A,B,ref,\na,b,r,x\n", "src": "A", "mt": "B", "ref": ""}
        answer = httpx.post(f"{url}/page/rows", json=body).json()
        assert answer["rows"][0]["sample"] == {"src": "a", "mt": "b"}
        assert answer["columns"]["ref"] is None


def test_rows_count_in_the_budget_of_all_requests():
    with running_service(FakeBackend(), max_body_bytes=1024, max_inflight_bytes=4096) as url:
        small = httpx.post(f"{url}/page/rows", json={"text": "src,mt\na,b\n"})
        assert small.status_code == 200
        assert httpx.post(f"{url}/page/rows", json={"text": "x" * 5000}).status_code == 413


def test_there_is_no_route_for_rows_where_nothing_asks_for_it():
    for backend, page in ((FakeBackend(), False), (FakeEmbedder(8, 16), True)):
        with running_service(backend, page=page) as url:
            answer = httpx.post(f"{url}/page/rows", json={"text": "src,mt\na,b\n"})
            assert answer.status_code == 404


def test_docs_lead_to_the_page_or_say_what_there_is(closed):
    answer = httpx.get(f"{closed}/docs")  # needs no key, as the page
    assert (answer.status_code, answer.headers["location"]) == (307, "./")
    page = httpx.get(f"{closed}/docs", follow_redirects=True)
    assert page.text == httpx.get(f"{closed}/").text
    assert httpx.post(f"{closed}/docs", json={}).status_code == 401
    with running_service(FakeBackend(), page=False) as url:
        answer = httpx.get(f"{url}/docs")
        assert answer.status_code == 404
        assert "GET /openapi.json" in answer.json()["error"]["message"]
