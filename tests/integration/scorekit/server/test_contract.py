"""Test the contract over real HTTP: routes, formats, limits, refusals."""

from __future__ import annotations

import hashlib
import json
import re
import threading

import httpx
import pytest

from scorekit.schemas import ScoreResponse
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from testing.servers import JSON, Held, running_service, wait_until
from tests.kits.contract import PAIR, _expected, _score


def test_result_k_answers_sample_k(url):
    samples = [{"id": f"n{i}", "src": f"s{i}", "mt": f"m{i * 7 % 13}"} for i in range(300)]
    answer = _score(url, *samples)
    ScoreResponse.model_validate(answer)
    assert answer["model"] == {"service": "metricx", "id": "fake-metricx", "revision": "fake"}
    for sample, result in zip(samples, answer["results"], strict=True):
        assert result["id"] == sample["id"]
        assert result["score"] == _expected(sample["src"], sample["mt"])


def test_ids_may_be_absent_null_or_repeated(url):
    answer = _score(url, PAIR, PAIR | {"id": None}, PAIR | {"id": "a"}, PAIR | {"id": "a"})
    assert [r["id"] for r in answer["results"]] == [None, None, "a", "a"]


def test_an_empty_reference_means_none_and_modes_mix(url):
    answer = _score(url, PAIR, PAIR | {"ref": ""}, PAIR | {"ref": None}, PAIR | {"ref": "안녕."})
    a, b, c, with_ref = (r["score"] for r in answer["results"])
    assert a == b == c == _expected(**PAIR)
    assert with_ref == _expected(**PAIR, ref="안녕.")


def test_an_empty_translation_is_scored_like_any_other(url):
    assert _score(url, {"src": "a", "mt": ""})["results"][0]["score"] == _expected("a", "")


def test_spans_are_code_points_of_the_translation(xcomet_url):
    mt = "😀 안녕 wrong 끝"
    (result,) = _score(xcomet_url, {"src": "a", "mt": mt})["results"]
    (span,) = result["error_spans"]
    assert mt[span["start"] : span["end"]] == span["text"] == "wrong"
    assert span["severity"] == "MAJOR"


def test_metricx_answers_carry_no_spans(url):
    assert "error_spans" not in _score(url, PAIR)["results"][0]


def test_a_second_request_is_answered_from_the_cache(url):
    sample = {"src": "cached", "mt": "한 번"}
    first, second = (_score(url, sample)["results"][0] for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["score"] == second["score"]
    third = _score(url, sample, options={"cache": False})["results"][0]
    assert not third["cached"]


def test_options_are_part_of_the_cache_key(url):
    sample = {"src": "word " * 30, "mt": "길다"}
    assert not _score(url, sample)["results"][0]["truncated"]["src"]
    assert _score(url, sample, options={"max_input_length": 20})["results"][0]["truncated"]["src"]
    failed = _score(url, sample, options={"max_input_length": 20, "overlong": "error"})
    assert failed["results"][0]["error"]["type"] == "overlong"


def test_a_whole_number_may_be_written_with_a_point(url):
    answer = _score(url, PAIR, options={"max_input_length": 20.0})
    assert answer["results"][0]["ok"]


def test_failed_samples_stand_beside_good_ones(url):
    answer = _score(
        url, PAIR, {"src": "a\0b", "mt": "x"}, {"src": "a", "mt": "nan", "id": "n"}, PAIR
    )
    good, nul, nan, repeated = answer["results"]
    assert good["ok"] and repeated["ok"]
    assert nul["error"] == {
        "type": "invalid_input",
        "message": "src: NUL character at position 1",
        "retryable": False,
    }
    assert nan["error"]["type"] == "non_finite" and nan["id"] == "n"
    assert "score" not in nul and "score" not in nan


@pytest.mark.parametrize(
    ("body", "message_part"),
    [
        (b"not json", "body: Invalid JSON"),
        (b"[]", "body: "),
        (b"{}", "samples: Field required"),
        (b'{"samples": []}', "samples: List should have at least 1 item"),
        (b'{"samples": [{"src": "a"}]}', "samples.0.mt: Field required"),
        (b'{"samples": [{"src": 1, "mt": "b"}]}', "samples.0.src: Input should be a valid string"),
        (b'{"samples": [{"src": "a", "mt": null}]}', "samples.0.mt: Input should be a valid"),
        (b'{"samples": [{"src": "a", "mt": "b", "x": 1}]}', "samples.0: 'x' is not a known field"),
        (b'{"samples": [{"src": "a", "mt": "b", "id": 3}]}', "samples.0.id: "),
        (b'{"samples": [{"src": "a", "mt": "b"}], "batch_size": 3}', "body: 'batch_size' is"),
        (b'{"samples": [{"src": "a", "mt": "b"}], "options": {"x": 1}}', "there are cache, overl"),
        (
            b'{"samples": [{"src": "a", "mt": "b"}], "options": {"max_input_length": 9999}}',
            "options.max_input_length: 9999, the model reads 512",
        ),
        (
            b'{"samples": [{"src": "a", "mt": "b"}], "options": {"max_input_length": 99.5}}',
            "options.max_input_length: ",
        ),
        (
            b'{"samples": [{"src": "a", "mt": "b"}], "options": {"max_input_length": 15}}',
            "options.max_input_length: ",
        ),
        (b'{"samples": [{"src": "a", "mt": "b"}], "priority": "urgent"}', "priority: "),
        (b'{"samples": [{"src": "a", "mt": "b"}], "timeout_s": 0}', "timeout_s: "),
        (b'{"samples": [{"src": "a", "mt": "b"}], "timeout_s": NaN}', "timeout_s: "),
        (b'{"samples": [{"src": "a", "mt": "b"}], "timeout_s": 1e999}', "timeout_s: "),
        (b'{"samples": [{"src": "\\ud800", "mt": "b"}]}', "body: Invalid JSON"),
        (b'{"samples": [{"src": "\xff", "mt": "b"}]}', "body: Invalid JSON"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/score", "/v1/score/stream"])
def test_a_request_of_the_wrong_shape_is_422_and_names_the_field(url, route, body, message_part):
    response = httpx.post(url + route, content=body, headers=JSON)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["type"] == "invalid_request" and not error["retryable"]
    assert message_part in error["message"]


def test_a_fault_of_many_samples_is_said_once_with_their_number(url):
    samples = [PAIR, *[{"src": "SECRET TEXT", "mt": 5}] * 400]
    error = _score(url, *samples, status=422)["error"]["message"]
    assert error == "samples.1.mt: Input should be a valid string (and 399 more like this)"


def test_only_so_many_samples_are_searched_for_faults(xcomet_url):
    wrong = {"src": "a", "mt": "b", "hyp": "c"}
    samples = [PAIR] * 2000 + [wrong] * 3000
    error = _score(xcomet_url, *samples, status=422)["error"]["message"]
    assert error.startswith("samples.2000: 'hyp' is not a known field; there are id, src, mt, ref")
    assert "(and 999 more like this); samples from samples.3000 on were not checked" in error


def test_a_refusal_names_ten_faults(url):
    samples = [PAIR | {f"x{number}": 1} for number in range(12)]
    error = _score(url, *samples, status=422)["error"]["message"]
    assert error.count(" is not a known field") == 10 and error.endswith("; and more")
    assert "samples.9: 'x9' is" in error and "x10" not in error


def test_one_sample_too_many_is_413(url):
    message = _score(url, *[PAIR] * 501, status=413)["error"]["message"]
    assert message == "samples: more than 500 samples in a request"
    assert len(_score(url, *[PAIR] * 500)["results"]) == 500


def test_the_default_limit_is_ten_thousand_samples(xcomet_url):
    assert httpx.get(f"{xcomet_url}/v1/info").json()["max_samples"] == 10_000
    assert len(_score(xcomet_url, *[PAIR] * 10_000)["results"]) == 10_000
    _score(xcomet_url, *[PAIR] * 10_001, status=413)


def test_a_twenty_megabyte_body_is_413_declared_or_not(url):
    body = b'{"samples": [{"src": "' + b"a" * 20 * 2**20 + b'", "mt": "b"}]}'
    declared = httpx.post(f"{url}/v1/score", content=body, headers=JSON)
    chunked = httpx.post(
        f"{url}/v1/score", content=iter([body[i::20] for i in range(20)]), headers=JSON
    )
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "body: more than 1048576 bytes"


@pytest.mark.parametrize(
    ("method", "path", "status", "type"),
    [("GET", "/nowhere", 404, "not_found"), ("GET", "/v1/score", 405, "method_not_allowed")],
)
def test_unknown_routes_answer_in_the_same_form(url, method, path, status, type):
    response = httpx.request(method, url + path)
    assert (response.status_code, response.json()["error"]["type"]) == (status, type)


def test_a_stream_gives_each_index_once_and_says_when_it_is_done(url):
    samples = [{"src": f"stream {i}", "mt": "m"} for i in range(50)] + [{"src": "\0", "mt": "m"}]
    with httpx.stream("POST", f"{url}/v1/score/stream", json={"samples": samples}) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        *lines, last = [json.loads(line) for line in response.iter_lines()]
    assert last == {"done": True, "ok": 50, "failed": 1}
    assert sorted(line["index"] for line in lines) == list(range(51))
    for line in lines:
        if line["ok"]:
            assert line["score"] == _expected(f"stream {line['index']}", "m")


def test_info_tells_what_a_caller_must_know(url):
    info = httpx.get(f"{url}/v1/info").json()
    assert info["service"] == "metricx" and info["higher_is_better"] is False
    assert info["score_range"] == {"min": 0.0, "max": 25.0}
    assert (info["max_samples"], info["max_body_bytes"]) == (500, 2**20)
    assert info["versions"]["scorekit"]


def test_metrics_count_requests_samples_and_batches(url):
    _score(url, {"src": "metrics", "mt": "m"})
    text = httpx.get(f"{url}/metrics").text
    assert 'scorekit_requests_total{route="/v1/score",status="200"}' in text
    assert 'scorekit_samples_total{outcome="ok"}' in text
    assert "scorekit_batch_samples_count" in text


def test_a_request_id_comes_back_and_a_strange_one_is_replaced(url):
    response = httpx.get(f"{url}/health/live", headers={"X-Request-Id": "run-7.step_3"})
    assert response.headers["x-request-id"] == "run-7.step_3"
    for strange in ("a" * 65, "a b", "<x>"):
        replaced = httpx.get(f"{url}/health/live", headers={"X-Request-Id": strange})
        assert replaced.headers["x-request-id"] != strange


def test_with_keys_everything_but_health_is_closed():
    from pydantic import SecretStr

    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("one, two"))) as url:
        assert httpx.get(f"{url}/health/live").status_code == 200
        for path in ("/v1/info", "/metrics", "/openapi.json"):
            refused = httpx.get(url + path)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "unauthorized"
            for header in ("Bearer three", "Basic one", "one", "Bearer"):
                assert httpx.get(url + path, headers={"Authorization": header}).status_code == 401
            for key in ("one", "two"):
                open_ = httpx.get(url + path, headers={"Authorization": f"Bearer {key}"})
                assert open_.status_code == 200


def test_a_401_says_how_to_give_a_key_and_no_figure_counts_a_wrong_one(capsys):
    from pydantic import SecretStr

    first_key, third_key = (hashlib.sha256(key).hexdigest()[:8] for key in (b"one", b"three"))
    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("one, two"))) as url:
        for header, message_part in (
            ("", "wants a key"),
            ("Bearer three", "not a key of this service"),
        ):
            refused = httpx.get(f"{url}/v1/info", headers={"Authorization": header})
            message = refused.json()["error"]["message"]
            assert message_part in message and "three" not in message
            assert "Authorization: Bearer" in message and "SCOREKIT_API_KEY" in message
        key = {"Authorization": "Bearer one"}
        body = {"samples": [{"src": "a", "mt": "b"}, {"src": "a", "mt": "c"}]}
        httpx.post(f"{url}/v1/score", json=body, headers=key)
        httpx.post(f"{url}/v1/score/stream", json=body, headers=key)
        metrics_text = httpx.get(f"{url}/metrics", headers=key).text
    counters = re.findall(
        r"^scorekit_key_(\w+)_total{key=\"(\w+)\"} (\d+)", metrics_text, re.MULTILINE
    )
    assert {k for _, k, _ in counters} == {first_key, hashlib.sha256(b"two").hexdigest()[:8]}
    assert ("requests", first_key, "2") in counters and ("samples", first_key, "4") in counters
    log = capsys.readouterr().out
    assert (
        third_key in log and first_key in log and "peer=127.0.0.1" in log and "path=/v1/info" in log
    )
    assert "three" not in log


@pytest.mark.parametrize(
    "path", ["/v1/score/", "/v1/score/stream/", "/v1/info/", "/docs/", "/redoc"]
)
def test_a_path_beside_a_route_is_404_and_no_redirect(url, path):
    for method in ("GET", "POST"):
        answer = httpx.request(method, url + path, headers={"Host": "203.0.113.7"})
        assert answer.status_code == 404 and "location" not in answer.headers
        assert answer.json()["error"]["type"] == "not_found"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/info", "/metrics"])
def test_whatever_can_be_read_can_be_asked_for_its_head(url, path):
    answer = httpx.head(url + path)
    assert answer.status_code == 200 and not answer.content
    assert httpx.get(url + path).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"samples": [PAIR | {"srcc": 1}]}, "samples.0: 'srcc' is not a known field; there are id"),
        ({"samples": [PAIR], "option": 1}, "body: 'option' is not a known field; there are samp"),
        ({"samples": [PAIR], "options": {"x": {"deep": 1}}}, "options: 'x' is not a known field"),
        ({"samples": [PAIR | {"a\n\x1b[31m": 1}]}, "samples.0: 'a\\n\\x1b[31m' is not"),
        ({"samples": [PAIR | {"가" * 5000: 1}]}, f"samples.0: '{'가' * 40}...' is not"),
    ],
    ids=["of a sample", "of the body", "of the options", "control characters", "long"],
)
def test_an_unknown_field_is_named(url, body, message):
    refused = httpx.post(f"{url}/v1/score", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"samples": [{"src": "a", "mt": "b",\n "mt": "c"}]}',
            "'mt' stands twice in an object, at",
        ),
        (b'{"samples": [], "samples": [{"src": "a", "mt": "b"}]}', "at line 1 column 27. Give it"),
        (
            b'{"samples": [{"src": "a", "mt": "b"}], "options": {"cache": true, "c\\u0061che": 1}}',
            "",
        ),
        (
            b'{"samples": [], "%s": 1, "%s": 2}' % (b"x" * 999, b"x" * 999),
            f"'{'x' * 40}...' stands",
        ),
    ],
    ids=["of a sample", "of the body", "escaped", "long"],
)
@pytest.mark.parametrize("route", ["/v1/score", "/v1/score/stream"])
def test_a_name_that_stands_twice_is_422_with_its_position(url, route, body, message):
    refused = httpx.post(url + route, content=body, headers=JSON)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert error["type"] == "invalid_request" and message in error["message"]
    assert error["message"].startswith("body: the name '")


def test_a_name_that_stands_twice_in_a_large_body_is_refused_too(xcomet_url):
    text = b"a" * 2**20
    body = b'{"samples": [{"src": "%b", "mt": "b", "mt": "c"}]}' % text
    refused = httpx.post(f"{xcomet_url}/v1/score", content=body, headers=JSON)
    assert refused.status_code == 422 and "'mt' stands twice" in refused.text


def test_a_byte_order_mark_before_the_body_is_no_fault(url):
    body = b"\xef\xbb\xbf" + json.dumps({"samples": [PAIR]}).encode()
    answer = httpx.post(f"{url}/v1/score", content=body, headers=JSON)
    assert answer.status_code == 200 and answer.json()["results"][0]["ok"]
    utf16 = httpx.post(f"{url}/v1/score", content=body.decode().encode("utf-16"), headers=JSON)
    assert utf16.status_code == 422


def test_a_full_queue_is_429_with_retry_after_and_accepted_work_is_answered():
    backend = Held()
    with running_service(backend, max_queue_items=10) as url:
        backend.hold()
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(
                _score(url, *[{"src": str(i), "mt": "m"} for i in range(9)])
            )
        )
        thread.start()
        wait_until(lambda: "scorekit_queue_items 9.0" in httpx.get(f"{url}/metrics").text)
        refused = httpx.post(f"{url}/v1/score", json={"samples": [PAIR, {"src": "b", "mt": "m"}]})
        assert refused.status_code == 429
        assert refused.json()["error"] == {
            "type": "overloaded",
            "message": "the queue is full",
            "retryable": True,
        }
        assert int(refused.headers["retry-after"]) >= 1
        refused = _score(url, *[{"src": str(i), "mt": "x"} for i in range(11)], status=413)
        assert "the queue holds 10" in refused["error"]["message"]
        backend.go.set()
        thread.join()
        assert all(r["ok"] for r in answers[0]["results"])
