"""Write bytes to every kind of server: offers of other protocols, HEAD, bodies that are no JSON."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator

import httpx
import pytest
from websockets.sync.client import connect

from scorekit.server.app import create_app
from scorekit.server.connection import server_config
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import JSON, PATIENCE_S, running_app, running_service
from tests.integration.scorekit.net.certificates import HAS_OPENSSL, self_signed
from tests.kits.server_kinds import KINDS, LAST, PAIR, RawClient, head, sockets_app

#: What Java's client sends with each first request of a connection.
OFFER = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
CONTENT = "Content-Type: application/json"
#: A body that is a request itself.
REQUEST = head("GET", "/health")


@pytest.fixture(scope="module", params=KINDS)
def server(request) -> Iterator[tuple[str, str]]:
    """Serve one kind; yield its URL and its name."""
    with KINDS[request.param].run() as url:
        yield url, request.param


def _first(name: str) -> tuple[str, bytes]:
    """Return the path and the body of a kind's first request."""
    path, body = next(iter(KINDS[name].posts.items()))
    return path, json.dumps(body).encode()


def _plain(url: str, path: str, body: bytes) -> object:
    with RawClient(url) as client:
        client.send(head("POST", path, CONTENT, f"Content-Length: {len(body)}") + body + LAST)
        answer, last = client.answers()
    assert (answer.status, last.status) == (200, 404)
    return answer.json()


def _chunks(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, body[:9], len(body) - 9, body[9:])


def _declared(path: str, body: bytes, *offer: str) -> bytes:
    return head("POST", path, *offer, CONTENT, f"Content-Length: {len(body)}")


WAYS = {
    "one segment": lambda path, body: [_declared(path, body, *OFFER) + body + LAST],
    "two segments": lambda path, body: [_declared(path, body, *OFFER), body + LAST],
    "a cut head": lambda path, body: [
        (request := _declared(path, body, *OFFER) + body + LAST)[:30],
        request[30 : -len(LAST) - 20],
        request[-len(LAST) - 20 :],
    ],
    "chunked": lambda path, body: [
        head("POST", path, *OFFER, CONTENT, "Transfer-Encoding: chunked") + _chunks(body) + LAST
    ],
    "chunked, two segments": lambda path, body: [
        head("POST", path, *OFFER, CONTENT, "Transfer-Encoding: chunked") + _chunks(body)[:20],
        _chunks(body)[20:] + LAST,
    ],
    "a websocket": lambda path, body: [_declared(path, body, *WEBSOCKET), body + LAST],
    "names in capitals": lambda path, body: [
        _declared(path, body, "CONNECTION: keep-alive, UPGRADE", "UPGRADE: H2C"),
        body + LAST,
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_offers_another_protocol_is_answered_as_any(server, way):
    url, name = server
    path, body = _first(name)
    with RawClient(url) as client:
        client.send(*WAYS[way](path, body))
        answer, last = client.answers()
    assert (answer.status, last.status) == (200, 404)
    assert "upgrade" not in answer.headers
    assert answer.json() == _plain(url, path, body)


def test_a_body_behind_an_offer_is_never_a_request(server):
    url, name = server
    path, _ = _first(name)
    with RawClient(url) as client:
        client.send(_declared(path, REQUEST, *OFFER), REQUEST + LAST)
        refused, last = client.answers()
    assert (refused.status, last.status) == (422, 404)


def test_requests_behind_one_with_an_offer_are_answered_in_order(server):
    url, name = server
    path, body = _first(name)
    request = _declared(path, body, *OFFER) + body
    with RawClient(url) as client:
        client.send(request + request + head("GET", "/nothing", *OFFER) + request + LAST)
        statuses = [answer.status for answer in client.answers()]
    assert statuses == [200, 200, 404, 200, 404]


def test_connect_is_400_and_nothing_after_it_is_read(server):
    url, _ = server
    with RawClient(url) as client:
        client.send(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n" + REQUEST + LAST)
        (answer,) = client.answers()
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"] == "CONNECT: this server is no proxy"


def test_a_websocket_that_nobody_has_is_an_ordinary_request(server):
    url, name = server
    (path, *_) = KINDS[name].gets
    if name == "openenv":
        path = "/metadata?a=b"
    with RawClient(url) as client:
        request = head("GET", path, *WEBSOCKET)
        if name == "openenv":  # it has WebSockets, for HTTP/1.1 alone
            request = request.replace(b"HTTP/1.1", b"HTTP/1.0")
        client.send(request + LAST)
        answer = client.answers()[0]
    assert answer.status == 200 and answer.body == httpx.get(url + path).content


@pytest.mark.parametrize("size", [100, 17 * 2**20])
def test_the_limits_hold_behind_an_offer(size):
    with running_service(FakeBackend(), max_body_bytes=1024) as url, RawClient(url) as client:
        body = json.dumps({"samples": [PAIR | {"src": "a" * size}]}).encode()
        client.send(_declared("/v1/score", body, *OFFER), body[:2000] + LAST)
        status = client.answers()[0].status
    assert status == (200 if size == 100 else 413)


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificate")
def test_an_offer_under_tls_is_ignored_too(tmp_path):
    certificate, key = self_signed(tmp_path)
    app = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    config = server_config(app, receive_timeout_s=PATIENCE_S, max_body_bytes=2**20)
    config.ssl_certfile, config.ssl_keyfile = certificate, str(key)
    context = ssl.create_default_context(cafile=certificate)
    body = json.dumps({"samples": [PAIR]}).encode()
    with running_app(app, config) as url:
        secure = url.replace("http:", "https:")
        with RawClient(secure, context) as client:
            client.send(_declared("/v1/score", body, *OFFER), body + LAST)
            assert [answer.status for answer in client.answers()] == [200, 404]


# -- WebSockets -----------------------------------------------------------------------------------


def test_websockets_go_on_working_after_the_time_to_send_a_request_is_over():
    app = sockets_app()
    config = server_config(app, receive_timeout_s=0.3, max_body_bytes=2**20, ws="auto")
    with running_app(app, config) as url, connect(url.replace("http", "ws") + "/ws") as socket:
        socket.send("before")
        assert socket.recv() == "before"
        with RawClient(url) as late:  # its request ends later than the socket's clock would
            late.send(b"GET /health HT")
            assert [answer.status for answer in late.answers()] == [408]
        socket.send("after")
        assert socket.recv() == "after"


def test_data_before_a_websocket_is_open_is_refused():
    app = sockets_app()
    config = server_config(app, receive_timeout_s=PATIENCE_S, max_body_bytes=2**20, ws="auto")
    with running_app(app, config) as url, RawClient(url) as client:
        client.send(head("GET", "/ws", *WEBSOCKET) + REQUEST)
        assert [answer.status for answer in client.answers()] == [400]


def test_a_websocket_behind_an_unanswered_request_does_not_write_into_its_answer():
    app = sockets_app()
    config = server_config(app, receive_timeout_s=PATIENCE_S, max_body_bytes=2**20, ws="auto")
    with running_app(app, config) as url, RawClient(url) as client:
        client.send(head("GET", "/metadata") + head("GET", "/ws", *WEBSOCKET) + LAST)
        assert [answer.status for answer in client.answers()] == [200, 404, 404]


# -- HEAD -----------------------------------------------------------------------------------------

_OWN = {"date", "x-request-id", "x-total-time", "x-tokenise-time", "x-queue-time", "x-model-time"}


def test_head_is_get_without_a_body(server):
    url, name = server
    paths = (*KINDS[name].gets, *KINDS[name].posts, "/nothing")
    for path in paths:
        with RawClient(url) as client:
            client.send(head("HEAD", path) + head("GET", path, "Connection: close"))
            data = b""
            while part := client._socket.recv(65536):
                data += part
        head_lines, _, more = data.partition(b"\r\n\r\n")
        get_lines, _, body = more.partition(b"\r\n\r\n")
        assert more.startswith(b"HTTP/1.1 "), path  # no body before the answer to GET
        of_head, of_get = (_headers(lines) for lines in (head_lines, get_lines))
        if path == "/metrics":  # the first request is counted in the second answer
            assert int(of_head.pop("content-length")) > 100 and of_get.pop("content-length")
        assert of_head == of_get, path
        if path != "/metrics":
            assert int(of_head["content-length"]) == len(body), path


def _headers(lines: bytes) -> dict[str, str]:
    first, *pairs = lines.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (p.partition(":") for p in pairs)}
    headers.pop("connection", None)
    return {"status": first} | {k: v for k, v in headers.items() if k not in _OWN}


def test_every_route_that_can_be_read_is_among_those_above(server):
    url, name = server
    if name in ("openrlhf", "gemmax"):
        pytest.skip("it has no list of its routes")
    tried = {path.partition("?")[0] for path in KINDS[name].gets}
    for path, operations in httpx.get(f"{url}/openapi.json").json()["paths"].items():
        if "get" in operations:
            assert path.replace("{page_id}", "trade_2") in tried


# -- bodies ---------------------------------------------------------------------------------------

#: JSON in place of a value; each is a fault of the request.
VALUES = {
    "deep": b"[" * 100_000,
    "deep and closed": b"[" * 5_000 + b"]" * 5_000,
    "5,000 digits": b"1" * 5_000,
    "a lone surrogate": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "not a number": b"NaN",
    "half a string": b'"a',
    "nothing": b"",
}
BODIES = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"a"',
    "a number": b"5",
    "a date": b'"2026-02-30"',
    "UTF-16": "{}".encode("utf-16"),
    "two marks": b"\xef\xbb\xbf\xef\xbb\xbf{}",
    "a name twice": b'{"a": 1, "a": 2}',
}


def test_a_wrong_body_is_one_typed_4xx(server):
    url, name = server
    with httpx.Client() as client:
        for path, body in KINDS[name].posts.items():
            text = json.dumps(body).encode()
            begin = text.index(b'"', text.rindex(b": ")) if b': "' in text else text.index(b'["')
            wrong = {case: text[:begin] + value for case, value in VALUES.items()}
            wrong |= {
                f"{case} (valid around)": text.replace(_last_value(text), value)
                for case, value in VALUES.items()
            }
            for case, content in (wrong | BODIES).items():
                answer = client.post(url + path, content=content, headers=JSON)
                if name == "openenv" and answer.status_code == 200:
                    continue  # it is JSON, which the echo takes
                assert 400 <= answer.status_code < 500, (path, case, answer.text)
                if name == "openenv" and not content:
                    continue  # so is a request without a body
                error = answer.json()["error"]
                assert error["type"] and "\n" not in error["message"]
            assert client.post(url + path, json=body).status_code == 200


def _last_value(text: bytes) -> bytes:
    """Return the last string of a JSON text."""
    end = text.rindex(b'"')
    return text[text.rindex(b'"', 0, end) : end + 1]


def test_a_name_that_stands_twice_is_refused_by_every_server(server):
    url, name = server
    for path, body in KINDS[name].posts.items():
        text = json.dumps(body)
        repeated = f"{text[:-1]}, {text[1:]}"
        answer = httpx.post(url + path, content=repeated.encode(), headers=JSON)
        assert answer.status_code == 422
        assert "stands twice in an object, at line 1 column " in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["2026-02-30", "\ufeffa", "1e999", "__proto__"])
def test_a_text_that_looks_like_something_else_is_a_text(server, text):
    url, name = server
    for path, body in KINDS[name].posts.items():
        content = json.dumps(body, ensure_ascii=False).encode()
        changed = content.replace(_last_value(content), json.dumps(text).encode())
        status = httpx.post(url + path, content=changed, headers=JSON).status_code
        assert status == 200 if name != "judge" else status in (200, 422)


def test_a_byte_order_mark_is_no_fault_of_any_server(server):
    url, name = server
    for path, body in KINDS[name].posts.items():
        content = b"\xef\xbb\xbf" + json.dumps(body).encode()
        assert httpx.post(url + path, content=content, headers=JSON).status_code == 200


# -- pages of other sites -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "trainer:5000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Encoding": "br"}, 415),
        ({}, 200),
    ],
    ids=lambda value: next(iter(value.values()), "none") if isinstance(value, dict) else None,
)
def test_a_bridge_refuses_what_a_service_refuses(server, headers, status):
    url, name = server
    if not KINDS[name].is_bridge:
        pytest.skip("see test_origin.py")
    for path, body in KINDS[name].posts.items():
        content = json.dumps(body).encode()
        answer = httpx.post(url + path, content=content, headers=JSON | headers)
        assert answer.status_code == status, answer.text
    of_get = {403: 403}.get(status, 200)
    for path in KINDS[name].gets:
        answer = httpx.get(url + path, headers=headers)
        assert answer.status_code == (200 if path == "/health" else of_get)


def test_a_websocket_of_a_foreign_host_is_refused(server):
    url, name = server
    if name != "openenv":
        pytest.skip("it has no WebSockets")
    for line in ("Origin: https://evil.example", "Origin: http://localhost:3000"):
        with RawClient(url) as client:
            client.send(head("GET", "/ws", *WEBSOCKET, line))
            assert client.answers()[0].status == 403
    with RawClient(url) as client:
        request = head("GET", "/ws", *WEBSOCKET).replace(b"localhost", b"evil.example")
        client.send(request)
        assert client.answers()[0].status == 403
