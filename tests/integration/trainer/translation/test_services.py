"""Test the reward services of a run: the first check, requests over HTTP, giving up in time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from scorekit.errors import RequestError, UserError
from scorekit.schemas import Scored
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from scorekit.server.fake import FakeBackend
from scorekit.server.score_endpoint import ScoreDescription
from scorekit.server.settings import Secrets
from testing.servers import running_service
from tests.kits.trainer.composite_rewards import Wrapped, service_behind
from tests.kits.trainer.rewards import TEXTS, Recorder, Services, reward_services, rewards_of
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import RewardClient


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with reward_services() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METRICX_URL", raising=False)
    monkeypatch.delenv("XCOMET_URL", raising=False)


def test_urls_from_the_environment(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICX_URL", services.urls["metricx_urls"])
    monkeypatch.setenv("XCOMET_URL", services.urls["xcomet_urls"])
    rewarder = RewardClient(RewardConfig())
    assert set(rewarder.infos) == set(services.urls.values())
    rewarder.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metricx_urls": []}, "reward.metricx_urls: required"),
        ({"metricx_model_name": "google/other"}, "runs 'fake-metricx', but reward.metricx_model"),
        ({"metricx_tokenizer_name": "t"}, "reward.metricx_tokenizer_name is 't'"),
        ({"xcomet_model_name": "Unbabel/XCOMET-XL"}, "runs 'fake-xcomet'"),
        ({"metricx_urls": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        ({"metricx_urls": "no_such_module:Scorer"}, "cannot be loaded"),
        ({"metricx_urls": "localhost:8001"}, "'localhost:8001': expected a URL with http://"),
        (
            {"metricx_scorer_args": {"device": "cpu"}},
            "metricx_scorer_args: only for a module:Class",
        ),
        ({"max_input_length": 100_000}, "tokens, but reward.max_input_length is 100000"),
    ],
)
def test_services_are_checked_first(services: Services, changes: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        RewardClient(services.config(**changes))
    assert message in str(error.value)


def test_swapped_and_reversed_services_are_refused(services: Services) -> None:
    swapped = services.config(metricx_urls=services.urls["xcomet_urls"])
    with pytest.raises(UserError, match="is a xcomet service"):
        RewardClient(swapped)
    with (
        running_service(Recorder("metricx", higher=True)) as url,
        pytest.raises(UserError, match="higher_is_better=True"),
    ):
        RewardClient(services.config(metricx_urls=url))


class OtherRevision(Recorder):
    def load(self) -> ScoreDescription:
        return replace(super().load(), revision="other")


def test_urls_of_one_service_must_agree(services: Services) -> None:
    same = services.urls["metricx_urls"]
    with running_service(OtherRevision("metricx")) as url:
        with pytest.raises(UserError) as error:
            RewardClient(services.config(metricx_urls=[same, url]))
    for message_part in ("reward.metricx_urls: ", same, url, "has revision", "'other'"):
        assert message_part in str(error.value)
    with running_service(Recorder("metricx")) as url:
        RewardClient(services.config(metricx_urls=[same, url])).close()


class Dying(Recorder):
    """A scorer that answers with an error for each sample."""

    def encode(self, samples: Any, options: Any) -> Any:
        if samples[0].src.startswith("word "):  # not a sample of the warm-up
            return super().encode(samples, options)
        raise RuntimeError("out of order")


@pytest.mark.parametrize("failure", ["stopped", "broken", "in process"])
def test_a_service_that_is_only_shown_never_ends_a_run(
    services: Services, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"metricx_urls": f"{__name__}:BrokenScorer", "metricx_scorer_args": {}}
    with running_service(Dying("metricx") if failure == "broken" else Recorder("metricx")) as url:
        if failure != "in process":
            settings = {"metricx_urls": url}
        cfg = services.config(w_metricx=0, on_failure="fail", **settings)
        rewarder = RewardClient(cfg)
        if failure == "broken":
            results = rewarder.score(TEXTS, rewarder.available).results
    if failure != "broken":
        results = rewarder.score(TEXTS, rewarder.available).results
    assert [result.ok for result in results["metricx"]] == [False, False]
    assert [result.ok for result in results["xcomet"]] == [True, True]
    if failure == "broken":  # it answers: each sample has its own error
        rewarder.close()
        return
    retried = rewarder.score(TEXTS, rewarder.available).results
    assert [result.ok for result in retried["metricx"]] == [False, False]
    rewarder.close()
    # Each batch tries it once more.
    assert caplog.text.count("metricx is skipped for this batch") == 2


def test_a_scorer_that_is_only_shown_may_fail_to_open(services: Services) -> None:
    settings = {"metricx_urls": f"{__name__}:LengthScorer", "metricx_scorer_args": {"wrong": 1}}
    with pytest.raises(UserError, match=r"metricx_scorer_args: .*'wrong'; its arguments: factor"):
        RewardClient(services.config(**settings))
    rewarder = RewardClient(services.config(w_metricx=0, **settings))
    results = rewarder.score(TEXTS, rewarder.available).results
    assert [result.ok for result in results["metricx"]] == [False, False]
    assert [result.ok for result in results["xcomet"]] == [True, True]
    rewarder.close()


def test_a_wrong_key_is_no_reason_to_drop_samples() -> None:
    secrets = Secrets(api_keys=SecretStr("right"))
    with running_service(FakeBackend("metricx"), secrets) as url:
        with pytest.raises(UserError, match="unauthorized"):
            RewardClient(RewardConfig(metricx_urls=[url], w_xcomet_span=0))


def test_a_refusal_for_good_is_raised() -> None:
    error = {"type": "invalid_request", "message": "no such option"}
    refusal = json.dumps({"error": error}).encode()

    def wrapper(app: Any) -> Wrapped:
        return Wrapped(app, lambda mts: (400, refusal))

    with service_behind(wrapper, FakeBackend("metricx")) as (_, url):
        with closing(RewardClient(RewardConfig(metricx_urls=[url], w_xcomet_span=0))) as rewarder:
            with pytest.raises(RequestError, match="no such option"):
                rewarder.score(TEXTS)


class LengthScorer:
    """A scorer in this process."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        return reward_output(
            [
                Scored.model_validate(
                    {
                        "id": None,
                        "ok": True,
                        "score": self.factor * len(s.mt),
                        "tokens": 1,
                        "truncated": {"src": False, "mt": False},
                        "mt_covered": len(s.mt),
                        "cached": False,
                    }
                )
                for s in samples
            ]
        )


class BrokenScorer(LengthScorer):
    def score_batch(self, *_: Any) -> RewardOutput:
        raise ZeroDivisionError


class DescribedScorer(LengthScorer):
    description = FakeBackend("metricx").load()


def test_a_scorer_in_this_process_is_held_to_the_expectations() -> None:
    def opened(scorer: str, **changes: Any) -> None:
        RewardClient(
            RewardConfig(metricx_urls=[f"{__name__}:{scorer}"], w_xcomet_span=0, **changes)
        ).close()

    opened("DescribedScorer", metricx_model_name="fake-metricx")
    with pytest.raises(UserError, match=r"runs 'fake-metricx', but reward.metricx_model_name"):
        opened("DescribedScorer", metricx_model_name="google/other")
    with pytest.raises(UserError, match=r"accepts metricx_model_name nor describes .* to null"):
        opened("LengthScorer", metricx_model_name="fake-metricx")


def test_a_scorer_in_this_process() -> None:
    cfg = RewardConfig(
        metricx_urls=f"{__name__}:LengthScorer",  # type: ignore[arg-type]
        metricx_scorer_args={"factor": 2.0},
        w_xcomet_span=0,
    )
    (reward,) = rewards_of(cfg, "저장")
    assert reward.r_seq == 5.0 - 4.0
