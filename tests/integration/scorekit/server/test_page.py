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
from scorekit.server.http.settings import Secrets, ServiceSettings, parse_settings
from scorekit.server.page import make_page
from services.judge.model import RulesBackend
from services.judge.rubrics import load_rubrics
from testing.fake_embedder import FakeEmbedder
from testing.servers import running_service

KINDS = ("translations", "judge", "embedder", "retriever")


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
