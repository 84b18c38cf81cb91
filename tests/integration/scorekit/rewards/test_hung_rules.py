"""A function of the user's that hangs costs no other component its value, and no endless time."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from scorekit.errors import ModelChanged, UserError
from scorekit.rewards import SyncCompositeReward
from scorekit.rewards.rules import MAX_HUNG
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.http.settings import Secrets, ServiceSettings
from testing.servers import free_port, running_app, running_service, wait_ready, wait_until
from tests.kits.trainer.composite_rewards import fake, texts
from tests.kits.trainer.rewards import OtherMetric

GO = threading.Event()
CALLS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _release():
    GO.clear()
    CALLS.clear()
    yield
    GO.set()


def hang(sample):
    """Return a value once the test says so."""
    CALLS["hang"] += 1
    assert GO.wait(60)
    return 1.0


def hang_at_b(sample):
    """Return a value; of the text "b" once the test says so."""
    assert sample["mt"] != "b" or GO.wait(60)
    return 1.0


def give_one(sample):
    """Return 1."""
    return 1.0


def give_two(sample):
    """Return 2."""
    return 2.0


def rule(function, **keys):
    return {"rule": f"{__name__}:{function.__name__}", **keys}


def named_threads():
    return [t for t in threading.enumerate() if t.name == "function" and t.is_alive()]


def test_a_report_that_hangs_takes_no_other_rule_its_value():
    components = {"own": rule(give_one), "hang": rule(hang, weight=0), "second": rule(give_two)}
    config = {"components": components, "timeout_s": 0.2, "deadline_s": 20}
    with SyncCompositeReward(config) as reward:
        (result,) = reward.score(texts("a"))
    assert (result.reward, result.components["hang"].status) == (3.0, "timeout")
    assert result.components["hang"].message == "no result before the deadline"


def test_a_required_rule_that_hangs_leaves_the_values_of_the_others():
    config = {"components": {"own": rule(give_one), "hang": rule(hang)}, "deadline_s": 0.3}
    with SyncCompositeReward(config) as reward:
        (result,) = reward.score(texts("a"))
    assert (result.reward, result.reason) == (
        None,
        "hang: timeout: no result before the deadline",
    )
    assert result.components["own"].raw == 1.0 and result.is_transient


def test_the_texts_before_the_one_that_hangs_have_their_values():
    config = {"components": {"own": rule(hang_at_b)}, "deadline_s": 0.3}
    with SyncCompositeReward(config) as reward:
        results = reward.score(texts("a", "b", "c"))
    assert [result.reward for result in results] == [1.0, None, None]


def test_a_rule_of_which_many_calls_hang_fails_at_once_until_one_ends():
    config = {"components": {"own": rule(give_one), "hang": rule(hang)}, "deadline_s": 0.05}
    before = len(named_threads())
    with SyncCompositeReward(config) as reward:
        for _ in range(MAX_HUNG):
            reward.score(texts("a"))
        calls = CALLS["hang"]
        (result,) = reward.score(texts("a"), deadline_s=600)
        assert result.reason == (
            f"hang: timeout: {MAX_HUNG} calls of {__name__}:hang have not ended"
        )
        assert result.components["own"].raw == 1.0
        assert CALLS["hang"] == calls == MAX_HUNG
        wait_until(lambda: len(named_threads()) - before <= MAX_HUNG)
        GO.set()
        wait_until(lambda: reward.score(texts("a"), deadline_s=60)[0].reward == 2.0)


def test_a_report_of_which_an_earlier_call_hangs_is_not_waited_for_again():
    components = {"own": rule(give_one), "hang": rule(hang, weight=0)}
    config = {"components": components, "timeout_s": 300, "deadline_s": 600}
    with SyncCompositeReward(config) as reward:
        reward.score(texts("a"), deadline_s=0.1)
        (result,) = reward.score(texts("a"))  # 300 s, if it were
    assert (result.reward, result.components["hang"].status) == (1.0, "timeout")


def test_a_service_that_is_only_reported_may_refuse_the_key():
    secrets = Secrets(api_keys="right")
    with (
        running_service(FakeBackend("xcomet")) as url,
        running_service(FakeBackend("metricx"), secrets) as locked,
    ):
        components = {
            "xcomet": {"service": url},
            "locked": {"service": locked, "weight": 0, "scale": -1},
        }
        with SyncCompositeReward({"components": components, "batch_size": 1}) as reward:
            mts = [str(index) for index in range(12)]
            results = reward.score(texts(*mts))
        assert [result.reward for result in results] == [*map(fake, mts)]
        assert {result.components["locked"].status for result in results} == {"upstream"}
        assert "unauthorized" in results[0].components["locked"].message


@pytest.mark.parametrize("weight", [0, 1])
def test_only_a_service_that_is_weighted_ends_a_call_when_its_model_changes(weight, monkeypatch):
    monkeypatch.setattr("scorekit.client.replicas._REST_S", 0.0)
    port = free_port()
    mts = [str(index) for index in range(12)]
    with running_service(FakeBackend("xcomet")) as url:
        components = {
            "xcomet": {"service": url},
            "mixed": {"service": [url, f"http://127.0.0.1:{port}"], "weight": weight},
        }
        with SyncCompositeReward({"components": components, "batch_size": 1}) as reward:
            assert reward.score(texts("a"))[0].components["mixed"].status == "ok"
            app = create_app(OtherMetric(), ServiceSettings(cache="memory"))
            with running_app(app, port=port) as other:
                wait_ready(other)
                if weight:
                    with pytest.raises(ModelChanged):
                        reward.score(texts(*mts))
                else:
                    results = reward.score(texts(*mts))
                    assert [result.reward for result in results] == [*map(fake, mts)]
                    assert "it runs" in " ".join(r.components["mixed"].message for r in results)


def test_two_models_at_the_start_are_a_mistake_whatever_the_weight():
    with (
        running_service(FakeBackend("xcomet")) as url,
        running_service(OtherMetric()) as other,
    ):
        for weight in (0, 1):
            components = {
                "xcomet": {"service": url},
                "mixed": {"service": [url, other], "weight": weight},
            }
            with SyncCompositeReward({"components": components}) as reward:
                with pytest.raises(UserError, match="scores of one run must be of one model"):
                    reward.score(texts("a"))
