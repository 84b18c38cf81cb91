"""A sick service gives no reward: never 0, never an exception for one text, never paid twice."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading

import pytest

from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.rewards import CompositeReward, SyncCompositeReward
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from testing.flaky_server import FlakyServer
from testing.servers import Held, free_port, running_service, wait_until
from tests.kits.trainer.composite_rewards import Wrapped, definition, fake, service_behind, texts
from tests.kits.trainer.rewards import OtherMetric, Recorder


@pytest.fixture(scope="module")
def flaky():
    with service_behind(FlakyServer) as (server, url):
        server.url = url
        yield server


@pytest.mark.parametrize("failure", ["429", "500", "503", "garbage", "other", "cut", "hang"])
def test_a_service_that_fails_gives_no_reward_and_recovers(flaky, failure):
    flaky.recover()
    with SyncCompositeReward(definition(flaky.url, 1.5)) as reward:
        reward.check()
        flaky.mood = lambda path, body: failure if path == "/v1/score" else None
        try:
            failed = reward.score(texts("a", "b"))
        finally:
            flaky.recover()
        for result in failed:
            component = result.components["xcomet"]
            assert result.reward is None
            # A 500 without a type may be a text that ends its server: the client finds out which.
            assert result.is_transient == (component.status != "model_failure")
            assert (component.raw, component.scaled) == (None, None)
            assert component.status in ("upstream", "timeout", "model_failure")
            assert result.components["copy"].raw == 0.0
        # The client remembers a text that seemed to end its server, so other ones are asked.
        assert [r.reward for r in reward.score(texts("c", "d"))] == [fake("c"), fake("d")]


@pytest.mark.parametrize("failure", ["429", "503", "cut"])
def test_a_service_that_fails_for_a_moment_costs_no_reward(flaky, failure):
    flaky.recover()
    failures = [failure, failure]
    flaky.mood = lambda path, body: failures.pop() if path == "/v1/score" and failures else None
    with SyncCompositeReward(definition(flaky.url)) as reward:
        assert [r.reward for r in reward.score(texts("c", "d"))] == [fake("c"), fake("d")]
    assert not failures


def test_calls_that_share_no_requests_are_sent_and_fail_by_themselves():
    """Check the sizes of requests, and that an outage is a result and a refusal for good raises."""
    refusal = json.dumps({"error": {"type": "invalid_request", "message": "no"}}).encode()

    def answer(mts):
        other = (200, b'{"status": "ok"}')  # of another program
        return {"down": (503, b"{}"), "other": other, "refuse": (400, refusal)}.get(mts[0])

    async def run(url):
        config = definition(url, 0.5, batch_size=3)
        async with CompositeReward(config, shares_requests=False) as reward:
            await reward.check()
            calls = [[f"{n}a", f"{n}b"] for n in range(6)]
            calls += [["down", "fine"], ["other", "fine"], list("abcd")]
            results = await asyncio.gather(
                *(reward.score(texts(*mts), deadline_s=math.inf) for mts in calls)
            )
            with pytest.raises(RequestError, match="no"):
                await reward.score(texts("refuse", "fine"))
            return calls, results

    with service_behind(lambda app: Wrapped(app, answer)) as (server, url):
        calls, results = asyncio.run(run(url))
    assert sorted(server.request_sizes)[:1] == [1] and set(server.request_sizes) == {1, 2, 3}
    assert server.request_sizes.count(2) >= 6 + 1 + 1 and server.request_sizes.count(3) == 1
    for mts, group in zip(calls, results, strict=True):
        expected = [None, None] if mts[-1] == "fine" else [fake(mt) for mt in mts]
        assert [result.reward for result in group] == expected
    assert all(result.is_transient for group in results[6:8] for result in group)


def test_nobody_answers():
    with SyncCompositeReward(definition(f"http://127.0.0.1:{free_port()}", 1.0)) as reward:
        (result,) = reward.score(texts("a"))
        assert result.reward is None and result.is_transient
        assert "cannot be reached" in result.reason
        with pytest.raises(ServiceUnreachable):
            reward.check()


def test_one_sick_service_of_two_leaves_the_value_of_the_other(flaky):
    flaky.recover()
    with running_service(FakeBackend("metricx")) as url:
        config = definition(flaky.url, 1.0)
        config["components"]["metricx"] = {"service": url, "scale": -1}
        flaky.mood = lambda path, body: "503" if path == "/v1/score" else None
        with SyncCompositeReward(config) as reward:
            (result,) = reward.score(texts("a"))
        flaky.recover()
    assert result.reward is None and result.reason.startswith("xcomet: upstream")
    assert result.components["metricx"].scaled == -fake("a", 25.0)
    assert result.wire()["components"]["metricx"]["status"] == "ok"


def test_half_a_batch_fails_and_the_other_half_has_its_rewards():
    backend = Recorder("xcomet")
    with running_service(backend) as url:
        config = definition(url)
        config["components"]["xcomet"]["options"] = {"overlong": "error"}
        with SyncCompositeReward(config) as reward:
            mts = ["a", "nan", "b", "x\0", "long", "c", "\ud800", ""]
            results = reward.score(texts(*mts))
    expected = [fake("a"), None, fake("b"), None, None, fake("c"), None, fake("")]
    assert [result.reward for result in results] == expected
    statuses = [result.components["xcomet"].status for result in results]
    assert statuses == [
        *("ok", "non_finite", "ok", "invalid_input", "overlong", "ok", "invalid_input", "ok")
    ]
    assert [result.is_transient for result in results] == [False] * 8


def numbers(value):
    """Return the wrapper that answers `value` for the translation "bad", and 0.5 for others."""

    def answer(mts):
        result = {
            "id": None,
            "ok": True,
            "tokens": 1,
            "truncated": {"src": False, "mt": False},
            "mt_covered": 1,
            "cached": False,
        }
        results = [{**result, "score": value if mt == "bad" else 0.5} for mt in mts]
        model = {"service": "xcomet", "id": "fake-xcomet", "revision": "fake"}
        return 200, json.dumps({"model": model, "results": results}).encode()

    return lambda app: Wrapped(app, answer)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.5", None])
def test_a_score_that_is_no_number_is_refused_and_spares_its_siblings(value):
    with service_behind(numbers(value)) as (_, url):
        with SyncCompositeReward(definition(url)) as reward:
            results = reward.score(texts("a", "b", "bad", "c", "d"))
    assert [result.reward for result in results] == [0.5, 0.5, None, 0.5, 0.5]
    expected = "no finite number" if isinstance(value, float) else "another shape"
    assert expected in results[2].reason


@pytest.mark.parametrize("status", [422, 500])
def test_a_text_for_which_the_request_is_refused_spares_its_siblings(status):
    error_type = {422: "invalid_request", 500: "internal"}[status]
    error = {"error": {"type": error_type, "message": "no", "retryable": False}}
    answer = status, json.dumps(error).encode()
    poisoned = lambda app: Wrapped(app, lambda mts: answer if "bad" in mts else None)  # noqa: E731
    mts = [str(index) for index in range(31)]
    with service_behind(poisoned) as (wrapped, url):
        with SyncCompositeReward(definition(url)) as reward:
            results = reward.score(texts(*mts, "bad"))
        assert [result.reward for result in results] == [*map(fake, mts), None]
        assert results[-1].components["xcomet"].status == "upstream"
        assert len(wrapped.request_sizes) == 1 + 2 * 5  # halves of 32


@pytest.mark.parametrize("failure", ["429", "503", "cut", "hang"])
def test_a_text_for_which_requests_fail_until_the_end_spares_its_siblings(flaky, failure):
    """Samples that share a request with it are requested alone before the deadline."""
    mts = [f"{failure} {index}" for index in range(6)]
    flaky.recover()
    flaky.mood = lambda path, body: failure if path == "/v1/score" and "bad" in body else None
    with SyncCompositeReward(definition(flaky.url, 3.0, timeout_s=0.5)) as reward:
        results = reward.score(texts(*mts, f"bad {failure}"))
    flaky.recover()
    assert [result.reward for result in results] == [*map(fake, mts), None]
    assert results[-1].is_transient


def test_a_text_that_hangs_takes_no_time_from_the_half_of_another_bad_text(flaky):
    mts = [f"spared {index}" for index in range(6)]

    def mood(path, body):
        if path != "/v1/score":
            return None
        return "garbage" if "unreadable" in body else "hang" if "slow" in body else None

    flaky.mood, flaky.latency_s = mood, lambda path: 0.1
    with SyncCompositeReward(definition(flaky.url, 3.0, timeout_s=0.5)) as reward:
        results = reward.score(texts("slow", *mts, "unreadable"))
    flaky.recover()
    flaky.latency_s = lambda path: 0.0
    assert [result.reward for result in results] == [None, *map(fake, mts), None]


def test_a_service_that_refuses_every_request_is_not_asked_without_end():
    answer = 422, b'{"error": {"type": "invalid_request", "message": "no", "retryable": false}}'
    with service_behind(lambda app: Wrapped(app, lambda mts: answer)) as (wrapped, url):
        with SyncCompositeReward(definition(url)) as reward:
            results = reward.score(texts(*map(str, range(64))))
    assert [result.reward for result in results] == [None] * 64
    assert not any(result.is_transient for result in results)
    assert 1 < len(wrapped.request_sizes) <= 1 + 32


def test_a_wrong_key_ends_the_call():
    secrets = Secrets(api_keys="right")
    with running_service(FakeBackend("xcomet"), secrets) as url:
        with SyncCompositeReward(definition(url), api_key="wrong") as reward:
            with pytest.raises(RequestError, match="unauthorized"):
                reward.score(texts("a"))
        with SyncCompositeReward(definition(url), api_key="right") as reward:
            assert reward.score(texts("a"))[0].reward == fake("a")


def test_another_model_at_one_of_two_urls_ends_the_call():
    """Scores of two models cannot be mixed, and waiting does not help."""
    with running_service(FakeBackend("xcomet")) as first, running_service(OtherMetric()) as other:
        config = definition([first, other], batch_size=1)
        with SyncCompositeReward(config) as reward, pytest.raises(UserError, match="one model"):
            reward.score(texts(*map(str, range(20))))


def hang(sample):
    """Return a value once the test says so."""
    assert GO.wait(60)
    return 1.0


GO = threading.Event()


def test_the_deadline_of_a_call_ends_it_whatever_hangs():
    backend = Held("xcomet")
    with running_service(backend) as url:
        config = definition(url)
        config["components"]["own"] = {"rule": f"{__name__}:hang", "weight": 0}
        with SyncCompositeReward(config) as reward:
            reward.check()
            backend.hold()
            (result,) = reward.score(texts("a"), deadline_s=0.5)
            backend.go.set()
            GO.set()
            assert (result.reward, result.components["xcomet"].status) == (None, "timeout")
            assert result.components["own"].status == "timeout"
            assert reward.score(texts("a"))[0].reward == fake("a")


def test_samples_of_a_caller_that_gave_up_are_not_sent():
    backend = Held("xcomet")

    async def run(url):
        config = definition(url, max_in_flight=1)
        async with CompositeReward(config) as reward:
            await reward.check()
            backend.hold()
            first = asyncio.ensure_future(reward.score(texts("first")))
            await asyncio.to_thread(backend.entered.wait)
            abandoned = asyncio.ensure_future(reward.score(texts("leaving")))
            staying = asyncio.ensure_future(reward.score(texts("staying")))
            await asyncio.sleep(0.05)  # both wait for the only slot
            abandoned.cancel()
            await asyncio.wait([abandoned])
            backend.go.set()
            return [(await task)[0].reward for task in (first, staying)]

    with service_behind(Wrapped, backend) as (wrapped, url):
        assert asyncio.run(run(url)) == [fake("first"), fake("staying")]
    assert wrapped.request_sizes == [1, 1]


def test_a_request_for_which_nobody_waits_is_cancelled():
    backend = Held("xcomet")
    with running_service(backend) as url:

        async def run():
            async with CompositeReward(definition(url)) as reward:
                await reward.check()
                backend.hold()
                task = asyncio.ensure_future(reward.score(texts("a")))
                await asyncio.to_thread(backend.entered.wait)
                task.cancel()
                await asyncio.wait([task])
                (service,) = reward._services.values()
                while service._requests:
                    await asyncio.sleep(0)
                backend.go.set()
                return (await reward.score(texts("b")))[0].reward

        assert asyncio.run(run()) == fake("b")


def test_no_sample_is_paid_twice_where_half_the_requests_fail():
    """Every answered sample was computed once: a retry sends only what has no answer yet."""
    backend = Recorder("xcomet")
    counter = iter(range(1000))
    error = {"error": {"type": "overloaded", "message": "busy", "retryable": True}}
    busy = 429, json.dumps(error).encode()
    alternating = lambda app: Wrapped(app, lambda _: busy if next(counter) % 2 == 0 else None)  # noqa: E731
    with service_behind(alternating, backend) as (_, url):
        backend.samples.clear()
        with SyncCompositeReward(definition(url, batch_size=8)) as reward:
            mts = [str(index) for index in range(32)]
            results = reward.score(texts(*mts, *mts))
    assert [result.reward for result in results] == [*map(fake, mts)] * 2
    assert len(backend.samples) <= 64  # equal texts of one request are sent once


def test_closing_ends_the_calls_that_wait():
    backend = Held("xcomet")
    with running_service(backend) as url:
        reward = SyncCompositeReward(definition(url))
        reward.check()
        backend.hold()
        errors = []

        def call():
            try:
                reward.score(texts("a"))
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(backend.entered.is_set)
        reward.close()
        thread.join()
        backend.go.set()
        assert errors == ["the composite reward was closed meanwhile"]


def test_a_report_that_hangs_is_not_waited_for_until_the_deadline(flaky):
    flaky.recover()
    components = {
        "copy": {"rule": "copy", "weight": -1.0},
        "reported": {"service": flaky.url, "weight": 0.0},
    }
    config = {"components": components, "timeout_s": 0.5, "deadline_s": 600}
    with SyncCompositeReward(config) as reward:
        flaky.mood = lambda path, body: "hang" if path == "/v1/score" else None
        (result,) = reward.score(texts("a report"))  # which nobody ends before its own limit
    flaky.recover()
    assert result.reward == 0.0 and result.components["reported"].status == "timeout"


_FOREVER = threading.Event()


def hang_forever(sample):
    """Return a value when the test is over."""
    _FOREVER.wait()
    return 1.0


def test_a_function_that_hangs_takes_no_other_call_its_reward():
    hanging = {"components": {"hang": {"rule": f"{__name__}:hang_forever"}}, "deadline_s": 0.2}
    healthy = {"components": {"repetition": {"rule": "repetition"}}, "deadline_s": 60}

    async def run():
        async with CompositeReward(hanging) as sick, CompositeReward(healthy) as well:
            failed = await asyncio.gather(*(sick.score(texts("a")) for _ in range(64)))
            return failed, await well.score(texts("a"))

    failed, (result,) = asyncio.run(run())
    assert {results[0].components["hang"].status for results in failed} == {"timeout"}
    assert {results[0].reward for results in failed} == {None} and result.reward == 0.0
    _FOREVER.set()


def test_a_function_that_hangs_does_not_keep_the_process_alive(tmp_path):
    (tmp_path / "slow_rules.py").write_text("import time\n\ndef f(s):\n    time.sleep(3600)\n")
    code = (
        "from scorekit.rewards import SyncCompositeReward\n"
        "c = {'components': {'f': {'rule': 'slow_rules:f'}}, 'deadline_s': 0.2}\n"
        "with SyncCompositeReward(c) as reward:\n"
        "    print(reward.score([{'src': 'a', 'mt': 'b'}])[0].reason)\n"
    )
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "f: timeout: no result before the deadline\n", done.stderr
