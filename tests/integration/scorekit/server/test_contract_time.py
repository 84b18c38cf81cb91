"""Test the contract under load and over time: deadlines, closed clients, large bodies."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest

from scorekit.server.fake import FakeBackend
from testing.servers import JSON, PATIENCE_S, Held, running_service, wait_until
from tests.kits.contract import PAIR, _score


def test_nothing_in_time_is_504_and_part_of_it_is_200_with_timeouts():
    backend = Held()
    with running_service(backend) as url:
        _score(url, PAIR)  # now it is cached
        backend.hold()
        error = _score(url, {"src": "slow", "mt": "m"}, status=504, timeout_s=0.1)["error"]
        assert error["type"] == "timeout" and error["retryable"]
        answer = _score(url, PAIR, {"src": "new", "mt": "m"}, timeout_s=0.1)
        good, late = answer["results"]
        assert good["ok"] and late["error"]["type"] == "timeout"
        backend.go.set()


def test_the_work_of_a_client_that_leaves_is_dropped():
    backend = Held()
    with running_service(backend) as url:
        backend.hold()

        async def until(metric_line):
            async with asyncio.timeout(PATIENCE_S):
                while (
                    metric_line not in (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
                ):
                    await asyncio.sleep(0.01)

        async def leave():
            async with httpx.AsyncClient() as client:
                asking = []
                for number, sample in enumerate((PAIR, {"src": "b", "mt": "m"}), start=1):
                    body = {"samples": [sample]}
                    asking.append(asyncio.create_task(client.post(f"{url}/v1/score", json=body)))
                    await until(f"scorekit_queue_items {number}.0")
                    await asyncio.to_thread(backend.entered.wait, PATIENCE_S)
                [task.cancel() for task in asking]
                await asyncio.gather(*asking, return_exceptions=True)
            await until('scorekit_requests_total{route="/v1/score",status="499"} 2.0')

        asyncio.run(leave())
        backend.go.set()
        assert _score(url, {"src": "c", "mt": "m"})["results"][0]["ok"]
        assert backend.batches == [1, 1]  # the second client's sample was never scored


def test_a_body_full_of_faults_is_named_once_with_its_count(url):
    body = b'{"samples": [' + b"0," * 400_000 + b"0]}"
    response = httpx.post(f"{url}/v1/score", content=body, headers=JSON)
    assert response.status_code in (413, 422)
    content = b'{"samples": [' + b"0," * 400 + b"0]}"
    message = httpx.post(f"{url}/v1/score", content=content, headers=JSON).json()["error"][
        "message"
    ]
    assert message.count("samples.") == 1 and "(and 400 more like this)" in message


@pytest.mark.parametrize(("samples", "chars"), [(1200, 1), (3, 100_000)])
def test_what_is_large_is_checked_and_hashed_beside_the_event_loop(monkeypatch, samples, chars):
    from scorekit.server import score_endpoint

    checked_in = set()
    text_error = score_endpoint.text_error

    def noting(*args):
        checked_in.add(threading.get_ident())
        return text_error(*args)

    monkeypatch.setattr(score_endpoint, "text_error", noting)
    with running_service(FakeBackend()) as url:
        _score(url, PAIR)
        _score(url, {"src": "small", "mt": "m"})
        assert len(checked_in) == 1  # the event loop's thread
        _score(url, *({"src": f"{i}", "mt": "m" * chars} for i in range(samples)))
        assert len(checked_in) == 2


@pytest.mark.parametrize("route", ["/v1/score", "/v1/score/stream"])
def test_samples_are_counted_by_what_was_answered(route):
    backend = Held()
    with running_service(backend) as url:
        _score(url, PAIR)
        backend.hold()
        late = {"src": "late", "mt": "m"}
        body = {"samples": [PAIR, late], "timeout_s": 0.1}
        assert '"timeout"' in httpx.post(f"{url}{route}", json=body).text
        counted = httpx.get(f"{url}/metrics").text
        backend.go.set()
    for outcome in ("ok", "cached", "timeout"):
        assert f'scorekit_samples_total{{outcome="{outcome}"}} 1.0' in counted
    assert 'scorekit_samples_total{outcome="cancelled"} 0.0' in counted


def test_a_stream_in_which_nothing_is_done_in_time_is_504():
    backend = Held()
    with running_service(backend) as url:
        _score(url, PAIR)
        backend.hold()
        body = {"samples": [{"src": "slow", "mt": "m"}], "timeout_s": 0.1}
        response = httpx.post(f"{url}/v1/score/stream", json=body)
        assert response.status_code == 504
        body = {"samples": [PAIR, {"src": "new", "mt": "m"}], "timeout_s": 0.1}
        lines = httpx.post(f"{url}/v1/score/stream", json=body).text.splitlines()
        backend.go.set()
        *results, last = map(json.loads, lines)
        assert last == {"done": True, "ok": 1, "failed": 1}
        assert results[1]["error"]["type"] == "timeout"


def test_a_reader_slower_than_the_deadline_still_gets_the_end_of_its_stream():
    """Check it with answers of the cache, which come in time however busy the machine is."""
    backend = Held("xcomet")
    with running_service(backend) as url:
        _score(url, PAIR)
        backend.hold()
        # More than the kernel's buffers take, so the service waits for its reader.
        cached = [PAIR | {"id": f"{i}".ljust(1200)} for i in range(6000)]
        late = [{"src": f"{i}", "mt": "m"} for i in range(100)]
        body = {"samples": cached + late, "timeout_s": 0.5}
        with httpx.stream("POST", f"{url}/v1/score/stream", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            time.sleep(1)
            *rows, last = lines
        backend.go.set()
    assert len(rows) == 6099
    assert json.loads(last) == {"done": True, "ok": 6000, "failed": 100}


def test_the_work_of_a_stream_whose_reader_leaves_is_dropped():
    backend = FakeBackend(seconds_per_batch=1.0)
    with running_service(backend, max_batch_tokens=16) as url:
        body = {"samples": [{"src": f"{i} b c d e f g h i", "mt": "m n o p"} for i in range(30)]}
        with httpx.stream("POST", f"{url}/v1/score/stream", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: "scorekit_queue_items 0.0" in httpx.get(f"{url}/metrics").text)
        assert len(backend.batches) < 10


def test_a_model_that_fails_every_text_is_not_ready_and_bad_texts_alone_do_not_make_it_so():
    backend = FakeBackend(poison="bad")
    with running_service(backend) as url:
        for i in range(3):
            (result,) = _score(url, {"src": str(i), "mt": "bad"})["results"]
            assert result["error"]["type"] == "model_failure"
            assert httpx.get(f"{url}/health/ready").status_code == 200
        backend.poison = ""  # now every text
        _score(url, {"src": "a", "mt": "good"})
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        reason = httpx.get(f"{url}/health/ready").json()["error"]["message"]
        assert reason == "the model fails"
        backend.poison = None
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
        assert _score(url, PAIR)["results"][0]["ok"]


def test_a_bug_is_500_with_the_id_under_which_the_log_has_it(monkeypatch):
    from scorekit.server import service

    def broken(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(service.ScoringService, "_items_with_keys", broken)
    with running_service(FakeBackend()) as url:
        headers = {"X-Request-Id": "the-id"}
        response = httpx.post(f"{url}/v1/score", json={"samples": [PAIR]}, headers=headers)
    assert response.status_code == 500 and response.headers["x-request-id"] == "the-id"
    assert response.json()["error"] == {
        "type": "internal",
        "message": "a bug; see the log for request the-id",
        "retryable": False,
    }
