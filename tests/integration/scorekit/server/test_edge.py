"""Check invalid requests to a service: slow, huge, malformed, unwanted."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from pydantic import SecretStr

from scorekit.server.connection import MAX_HEAD_BYTES
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from testing.servers import JSON, running_app, running_service, wait_until

PAIR = {"src": "Hello.", "mt": "안녕하세요."}
BODY = json.dumps({"samples": [PAIR]}).encode()
POST = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend(), max_body_bytes=2**20, max_field_chars=1000) as url:
        yield url


@pytest.fixture(scope="module")
def strict_url():
    """Serve with a second and a half for sending a request; a batch takes longer."""
    backend = FakeBackend(seconds_per_batch=2.0)
    with running_service(backend, receive_timeout_s=1.5, max_batch_tokens=16) as url:
        yield url


def _connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=180)


def _until_closed(connection):
    """Return everything until the service closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):  # it had not read all that was sent
        while data := connection.recv(65536):
            received += data
    return received


def _exchange(url, *parts):
    """Send, then read until the service closes the connection: status, headers and error."""
    with _connect(url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
        return _parsed(_until_closed(connection))


def _parsed(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)


def _drip(url, start, drop):
    """Send `start`, then one byte after another until the service answers or closes."""
    with _connect(url) as connection:
        connection.sendall(start)
        connection.settimeout(0.05)
        for _ in range(400):
            with contextlib.suppress(TimeoutError):
                first = connection.recv(1)
                connection.settimeout(180)
                return first + _until_closed(connection)
            connection.sendall(drop)
    raise AssertionError("the service waits for ever")


#: By what is sent slowly: the start of a request, and what follows again and again.
SLOW = {
    "request line": (b"POST /v1/sc", b"o"),
    "header": (POST + b"X-Slow: ", b"a"),
    "body": (POST + b"Content-Length: 9999\r\n\r\n{", b" "),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "empty lines": (b"\r\n", b"\r\n"),
}


def test_clients_that_send_a_byte_now_and_then_are_cut_off(strict_url):
    with ThreadPoolExecutor(len(SLOW)) as pool:
        answers = pool.map(lambda sent: _drip(strict_url, *sent), SLOW.values())
    for name, received in zip(SLOW, answers, strict=True):
        status, headers, answer = _parsed(received)
        assert (status, headers["connection"]) == (408, "close"), name
        assert answer["error"] == {
            "type": "slow_request",
            "message": "the request was not sent within 1.5 s",
            "retryable": True,
        }


def test_a_connection_that_never_sends_is_closed_without_a_word(strict_url):
    with _connect(strict_url) as connection:
        assert _until_closed(connection) == b""


def test_empty_lines_after_an_answer_do_not_hold_the_connection(strict_url):
    with _connect(strict_url) as connection:
        connection.sendall(GET.replace(b"Connection: close\r\n", b"") + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert _parsed(_until_closed(connection))[0] == 408


def test_a_request_that_was_cut_off_is_counted_as_such(strict_url):
    _exchange(strict_url, POST + b"Content-Length: 9999\r\n\r\n{")
    counted = 'scorekit_requests_total{route="/v1/score",status="408"}'
    wait_until(lambda: counted in httpx.get(f"{strict_url}/metrics").text)


def test_scoring_may_take_longer_than_sending(strict_url):
    sample = {"src": "a b c d e f g", "mt": "m n o p q r s t"}
    answer = httpx.post(f"{strict_url}/v1/score", json={"samples": [sample]}, timeout=180)
    assert [r["ok"] for r in answer.json()["results"]] == [True]


def test_a_stream_may_take_longer_than_sending(strict_url):
    samples = [{"src": f"{i} stream d e f g", "mt": "m n o p q r s t"} for i in range(2)]
    answer = httpx.post(f"{strict_url}/v1/score/stream", json={"samples": samples}, timeout=180)
    assert json.loads(answer.text.splitlines()[-1]) == {"done": True, "ok": 2, "failed": 0}


def test_a_kept_connection_may_rest_longer_than_sending_may_take(strict_url):
    client = http.client.HTTPConnection(strict_url.removeprefix("http://"), timeout=180)
    client.request("GET", "/health/live")
    assert client.getresponse().read() == b'{"live":true}'
    own_port = client.sock.getsockname()[1]  # None: it was closed meanwhile
    time.sleep(2.0)
    client.request("GET", "/health/live")
    assert client.getresponse().status == 200 and client.sock.getsockname()[1] == own_port


def test_a_slow_second_request_does_not_cost_the_first_its_answer(strict_url):
    body = json.dumps({"samples": [{"src": "pipelined", "mt": "m"}]}).encode()
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = _drip(strict_url, first + b"GET /health/l", b"l")
    assert answer.startswith(b"HTTP/1.1 200") and b'"ok":true' in answer


def test_many_slow_clients_do_not_keep_a_proper_one_waiting(url):
    with contextlib.ExitStack() as stack:
        for i in range(300):
            slow = stack.enter_context(_connect(url))
            slow.sendall(POST[: i % 30] if i % 2 else POST + b"Content-Length: 999\r\n\r\n{")
        for i in range(20):
            answer = httpx.post(f"{url}/v1/score", json={"samples": [PAIR | {"src": f"{i}"}]})
            assert answer.json()["results"][0]["ok"]


LARGE = b"Content-Length: 10000000\r\n"


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["", "expect"])
@pytest.mark.parametrize("path", [b"/v1/score", b"/v1/score/stream"])
def test_what_the_headers_forbid_is_refused_before_the_body_is_sent(url, path, expect):
    start = POST.replace(b"/v1/score", path)
    status, headers, answer = _exchange(url, start + LARGE + expect + b"\r\n")
    assert (status, answer["error"]["type"]) == (413, "too_large")
    assert headers["connection"] == "close" and headers["x-request-id"]
    status, headers, _ = _exchange(url, start.replace(b"/v1/", b"/v9/") + LARGE + expect + b"\r\n")
    assert (status, headers["connection"]) == (404, "close")


def test_a_wrong_key_is_refused_before_the_body_is_sent():
    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("right"))) as url:
        for key in (b"", b"Authorization: Bearer wrong\r\n"):
            for size in (LARGE, b"Content-Length: 10\r\n", b"Transfer-Encoding: chunked\r\n"):
                request = POST + key + size + b"Expect: 100-continue\r\n\r\n"
                status, headers, answer = _exchange(url, request)
                assert (status, answer["error"]["type"]) == (401, "unauthorized")
                assert headers["connection"] == "close"


def test_a_service_that_loads_refuses_before_the_body_is_sent():
    loaded = threading.Event()

    class Loading(FakeBackend):
        def load(self):
            loaded.wait(180)
            return super().load()

    from scorekit.server.app import create_app
    from scorekit.server.run import service_config
    from scorekit.server.settings import ServiceSettings

    settings = ServiceSettings(cache="memory")
    app = create_app(Loading(), settings)
    with running_app(app, service_config(app, settings), loaded=False) as url:
        wait_until(lambda: _alive(url))
        status, headers, answer = _exchange(url, POST + b"Content-Length: 1000\r\n\r\n")
        assert (status, answer["error"]["type"]) == (503, "unavailable")
        assert headers["retry-after"] == "5" and headers["connection"] == "close"
        loaded.set()


def _alive(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/live").status_code == 200
    return False


def test_who_asks_first_is_told_to_go_on_when_all_is_well(url):
    with _connect(url) as connection:
        head = b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        connection.sendall(POST + head % len(BODY))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert _parsed(_until_closed(connection))[0] == 200


def test_a_refusal_of_a_body_that_was_read_leaves_the_connection_open(url):
    with httpx.Client() as client:
        for _ in range(3):
            refused = client.post(f"{url}/v1/score", content=b"not json", headers=JSON)
            assert refused.status_code == 422 and "connection" not in refused.headers


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: -5",
        b"Content-Length: many",
        b"Content-Length: +5",
        b"Content-Length: 1_0",
        b"Content-Length: 5, 5",
        b"Content-Length: ",
        b"Content-Length: 99999999999999999999999999",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: nonsense",
        b"X-Folded: a\r\n b",
        b"no colon",
        b"bad name: x",
    ],
)
def test_malformed_headers_are_400_in_the_usual_form(url, headers):
    status, _, answer = _exchange(url, POST + headers + b"\r\n\r\n12345")
    assert status == 400
    assert answer["error"] == {
        "type": "invalid_request",
        "message": "not valid HTTP",
        "retryable": False,
    }


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ],
)
def test_what_is_no_http_request_is_400(url, request_bytes):
    assert _exchange(url, request_bytes)[0] == 400


@pytest.mark.parametrize(
    "parts",
    [
        [POST + b"X: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"],
        [POST + b"X: "] + [b"a" * 4096] * 200,
        [POST] + [b"X-%d: a\r\n" % i for i in range(20_000)],
        [b"GET /" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ],
    ids=["one", "endless", "many", "path"],
)
def test_headers_without_end_are_431(url, parts):
    status, headers, answer = _exchange(url, *parts)
    assert (status, headers["connection"], answer["error"]["type"]) == (431, "close", "too_large")


def test_large_headers_below_the_limit_are_read(url):
    filler = b"X: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n"
    assert _exchange(url, GET + filler)[0] == 200
    body = json.dumps({"samples": [PAIR], "options": {}}).encode().ljust(100_000)
    head = POST + b"Connection: close\r\nContent-Length: 100000\r\n\r\n"
    assert _exchange(url, head + body)[0] == 200


def test_chunks_over_the_limit_and_trailers_without_end_are_413(url):
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert _exchange(url, chunked, *[chunk] * 40)[0] == 413
    trailer = b"T: " + b"a" * 50_000 + b"\r\n"
    assert _exchange(url, chunked + b"1\r\n \r\n0\r\n", *[trailer] * 100)[0] == 413


def test_an_upgrade_to_websockets_is_an_ordinary_request():
    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("right"))) as url:
        upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        assert _exchange(url, b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n" + upgrade)[0] == 401


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_wrong_method_names_the_right_one(url, method):
    answer = httpx.request(method, f"{url}/v1/score")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "strange",
    [b"a" * 65, b"a b", b"<x>", b"\xff\xfe", "한국어".encode(), b"", b"a\tb", b'a"b', b"{}"],
)
def test_a_strange_request_id_is_replaced(url, strange):
    answer = _exchange(url, GET + b"X-Request-Id: " + strange + b"\r\n\r\n")
    request_id = answer[1]["x-request-id"]
    assert len(request_id) == 32 and request_id.isalnum()


@pytest.mark.parametrize("line_break", [b"\r", b"\n", b"\r\n "])
def test_a_request_id_cannot_bring_a_line_of_its_own(url, line_break):
    request = GET + b"X-Request-Id: a" + line_break + b"Set-Cookie: b\r\n\r\n"
    with _connect(url) as connection:
        connection.sendall(request)
        assert b"set-cookie" not in _until_closed(connection).lower()


@pytest.mark.parametrize("field", ["src", "mt", "ref"])
def test_a_text_that_is_too_long_fails_beside_its_siblings(url, field):
    exactly, over = "가" * 1000, "가" * 1001
    samples = [PAIR, PAIR | {field: over, "id": "long"}, PAIR | {field: exactly}]
    answer = httpx.post(f"{url}/v1/score", json={"samples": samples}).json()
    good, long, longest = answer["results"]
    assert good["ok"] and longest["ok"]
    assert long == {
        "id": "long",
        "ok": False,
        "error": {
            "type": "invalid_input",
            "message": f"{field}: 1,001 characters, at most 1,000",
            "retryable": False,
        },
    }
