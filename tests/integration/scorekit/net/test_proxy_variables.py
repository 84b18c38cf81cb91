"""Check every client of ours under the proxy and certificate variables that a shell may have."""

from __future__ import annotations

import asyncio
import socket

import pytest

from scorekit.client import SyncScoringClient
from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.net.http_clients import sync_client
from scorekit.retrieval.client import Retriever
from scorekit.server.fake import FakeBackend
from services.retriever.backends.late import Pooling
from synth.storage.stats import scorer_stats
from testing.servers import free_port, running_app, running_service
from trainer.rl.engines.vllm_http import VLLMServer, as_user_error

FAR = "http://gpu7.invalid:8001"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def score(url):
    with SyncScoringClient(url, deadline_s=5) as client:
        return client.score([{"src": "a", "mt": "b"}])


def embed(url):
    with Embeddings(url, deadline_s=5) as client:
        return client.embed(["a"])


def search(url):
    with Retriever(url, deadline_s=5) as client:
        return client.search(["a"])


def pool(url):
    return Pooling(url, "m", deadline_s=5).texts(["a"])


def list_models(url):
    async def work():
        server = VLLMServer(url)
        try:
            with as_user_error(server.url):
                return await server.models()
        finally:
            await server.close()

    return asyncio.run(work())


CLIENTS = [score, embed, search, pool, list_models]


@pytest.fixture(scope="module")
def service():
    with running_service(FakeBackend()) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_PROXY", "localhost,fd00::/8"),
        ("NO_PROXY", "[::1]"),
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("HTTP_PROXY", "http://127.0.0.1:1"),
        ("HTTP_PROXY", "nonsense://"),
        ("SSL_CERT_FILE", "/nowhere"),
    ],
)
def test_a_service_of_this_machine_is_asked_under_any_variable(environment, service, name, value):
    environment.setenv(name, value)
    (result,) = score(service)
    assert result.ok
    with sync_client(service) as client:
        assert client.get("/v1/info").status_code == 200
    assert scorer_stats(service, {})["batches"] >= 1


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("no_proxy", ["localhost,fd00::/8", "[::1],fd00::/999"])
def test_every_client_can_be_made_and_goes_through_the_proxy(environment, ask, no_proxy):
    """Check that the proxy gets the request of each client, though NO_PROXY has ranges in it."""
    seen = []

    async def proxy(scope, receive, send):
        if scope["type"] == "http":
            seen.append(dict(scope["headers"])[b"host"])
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>blocked</html>"})

    with running_app(proxy) as url:
        environment.setenv("HTTP_PROXY", url.replace("http://", "http://me:hidden@"))
        environment.setenv("NO_PROXY", no_proxy)
        with pytest.raises((ServiceUnreachable, RequestError, UserError)) as error_info:
            ask(FAR)
    message = str(error_info.value)
    assert seen and set(seen) == {b"gpu7.invalid:8001"}
    assert f"through the proxy HTTP_PROXY={url.replace('http://', 'http://***@')}" in message
    assert "hidden" not in message


@pytest.mark.parametrize("status", [200, 403, 502, 503])
def test_what_a_proxy_answers_in_place_of_a_service_names_the_proxy(
    environment, status, no_second_try
):
    async def proxy(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>blocked</html>"})

    with running_app(proxy) as url:
        environment.setenv("http_proxy", url)
        with pytest.raises((ServiceUnreachable, RequestError)) as error_info:
            score(FAR)
    assert f"through the proxy http_proxy={url}; NO_PROXY=gpu7.invalid" in str(error_info.value)


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_socks_proxy_without_its_package_is_one_line(environment, ask):
    environment.setenv("ALL_PROXY", "socks5://me:hidden@127.0.0.1:1080")
    environment.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^ALL_PROXY=socks5://\*\*\*@.*httpx\[socks\]"):
        ask(FAR)


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SSL_CERT_FILE", "/nowhere", "No such file"),
        ("SSL_CERT_FILE", __file__, "has no certificates"),
        ("SSL_CERT_FILE", "/", "Is a directory|has no certificates"),
        ("SSL_CERT_DIR", "/nowhere", "no such folder"),
    ],
)
def test_a_variable_that_names_no_certificates_is_one_line(environment, ask, name, value, words):
    environment.setenv(name, value)
    with pytest.raises(UserError, match=rf"^{name}={value}: ({words})"):
        ask(FAR.replace("http:", "https:"))


def test_several_services_have_each_its_own_proxy(environment, service):
    """Check a client of one URL on this machine and one behind a proxy that forwards to it."""
    seen = []

    async def proxy(scope, receive, send):
        if scope["type"] == "http":
            seen.append(scope["path"])
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with running_app(proxy) as url:
        environment.setenv("HTTP_PROXY", url)
        with SyncScoringClient([FAR, service]) as client:
            (result,) = client.score([{"src": "a", "mt": "b"}])
    assert result.ok and seen == ["/v1/info"]


def test_a_name_below_localhost_is_on_this_machine(environment, service):
    try:
        socket.getaddrinfo("metricx.localhost", free_port())
    except OSError:
        pytest.skip("this machine does not resolve names below localhost")
    environment.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    (result,) = score(service.replace("127.0.0.1", "metricx.localhost"))
    assert result.ok
