"""Check requests from a page of another site in a browser, and foreign host names."""

from __future__ import annotations

import json
from http.client import HTTPConnection

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets, ServiceSettings
from testing.servers import JSON, running_service

BODY = json.dumps({"samples": [{"src": "Hello.", "mt": "안녕하세요."}]}).encode()
KEY = "a-key"


@pytest.fixture(scope="module")
def backend():
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend):
    with running_service(backend, allow_host="metricx, Lab.Example., fd00::5") as url:
        yield url


@pytest.fixture(scope="module")
def closed_url():
    secrets = Secrets(api_keys=SecretStr(KEY))
    with running_service(FakeBackend(), secrets) as url:
        yield url


def post(url, **headers):
    """Send one sample, and return the status and the message of a refusal."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.post(f"{url}/v1/score", content=BODY, headers=JSON | named)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/jsonp",
    ],
)
def test_a_body_that_a_page_may_send_without_asking_is_415(url, backend, content):
    before = len(backend.batches)
    headers = {} if content is None else {"Content-Type": content}
    answer = httpx.post(f"{url}/v1/score", content=BODY, headers=headers)
    assert answer.status_code == 415
    message = answer.json()["error"]["message"]
    assert message.startswith("Content-Type: application/json is required.")
    assert len(backend.batches) == before


@pytest.mark.parametrize("content", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_named_in_any_of_its_forms(url, content):
    assert post(url, Content_Type=content)[0] == 200


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, identity"])
def test_an_encoding_that_is_not_understood_is_415(url, encoding):
    status, message = post(url, Content_Encoding=encoding)
    assert status == 415 and message.startswith("Content-Encoding: not supported.")


@pytest.mark.parametrize("route", ["/v1/score", "/v1/score/stream"])
def test_every_route_that_takes_a_body_wants_json(url, route):
    assert httpx.post(url + route, content=BODY).status_code == 415


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8003",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "metricx2",
        "evil.example@localhost",
        "localhost/evil.example",
    ],
)
@pytest.mark.parametrize("path", ["/v1/info", "/metrics", "/openapi.json", "/"])
def test_a_name_that_is_not_ours_reads_nothing(url, host, path):
    answer = httpx.get(url + path, headers={"Host": host})
    assert answer.status_code == 403 and "--allow-host" in answer.json()["error"]["message"]
    assert host not in answer.text  # foreign input is not echoed


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8003",
        "LOCALHOST",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.8.9.1:8003",
        "[::1]:8003",
        "10.1.2.3:8001",
        "metricx:8001",
        "lab.example",
    ],
)
def test_our_own_names_addresses_and_allowed_names_pass(url, host):
    assert httpx.get(f"{url}/v1/info", headers={"Host": host}).status_code == 200
    assert post(url, Host=host)[0] == 200


def test_health_answers_to_any_name(url):
    for path in ("/health/live", "/health/ready"):
        assert httpx.get(url + path, headers={"Host": "pod-17.cluster"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://10.9.9.9", "http://["])
def test_a_page_of_another_site_is_refused(url, backend, origin):
    before = len(backend.batches)
    status, message = post(url, Origin=origin)
    assert status == 403 and message.startswith("Origin: sent by a page of another site;")
    assert httpx.get(f"{url}/v1/info", headers={"Origin": origin}).status_code == 403
    assert len(backend.batches) == before


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://lab.example", "http://metricx:8001", "http://[fd00::5]:80"],
)
def test_a_page_of_this_machine_or_an_allowed_one_may_ask(url, origin):
    assert post(url, Origin=origin)[0] == 200


def test_the_page_of_a_service_that_is_asked_by_its_address_may_ask_it(url):
    assert post(url, Host="10.1.2.3:8001", Origin="http://10.1.2.3:8001")[0] == 200
    assert post(url, Host="10.1.2.3:8001", Origin="http://10.1.2.3:9")[0] == 403


def test_a_picture_or_a_link_on_another_site_reads_nothing(url):
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert httpx.get(f"{url}/v1/info", headers=headers).status_code == 403
    assert httpx.get(f"{url}/", headers=headers).status_code == 200  # a link to the page itself
    same = {"Sec-Fetch-Site": "same-origin"}
    assert httpx.get(f"{url}/v1/info", headers=same).status_code == 200


def test_a_service_with_keys_answers_to_any_name_and_page_that_has_one(closed_url):
    key = {"Authorization": f"Bearer {KEY}"}
    headers = {"Host": "metricx.scorekit.svc"} | key
    assert httpx.get(f"{closed_url}/v1/info", headers=headers).status_code == 200
    page = {"Origin": "https://judge.example"}  # behind a proxy that sets another Host
    assert post(closed_url, **page, **key)[0] == 200
    assert post(closed_url, **page)[0] == 401
    assert post(closed_url, Origin="https://evil.example")[0] == 401  # the key is checked first


@pytest.mark.parametrize("name", ["Host", "Origin", "Content-Type", "Content-Encoding"])
def test_a_header_that_is_sent_twice_is_refused(url, backend, name):
    before = len(backend.batches)
    values = {"Host": "localhost", "Origin": "http://localhost", "Content-Encoding": "identity"}
    repeated = [(name, "evil"), (name, values.get(name, "application/json"))]
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/score", skip_host=name == "Host")
    for header, value in [*repeated, ("Content-Length", f"{len(BODY)}")]:
        connection.putheader(header, value)
    connection.endheaders(BODY)
    answer = connection.getresponse()
    assert answer.status == 400
    message = json.loads(answer.read())["error"]["message"]
    assert message == f"{name}: sent more than once. Send it once"
    assert len(backend.batches) == before


@pytest.mark.parametrize(
    "name", ["https://judge.example", "judge.example:8003", "*", "a b", "judge.example/"]
)
def test_what_is_no_bare_host_name_is_not_allowed(name):
    with pytest.raises(ValidationError, match=r"is no host name\. Give it as in judge\.example"):
        ServiceSettings(allow_host=f"localhost, {name}")
