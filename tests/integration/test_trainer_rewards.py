"""Rewards over real HTTP: no references, no zeros for failures, no service that is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.schemas import Scored, TranslationSample
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from scorekit.server.backend import Description, Encoded
from scorekit.server.fake import FakeBackend, fake_score, fake_spans
from scorekit.server.settings import Secrets
from tests.servers import free_port, running_service
from tests.trainer_kit import rollout
from trainer.config import RewardConfig
from trainer.figures import reward_figures
from trainer.rewards import metricx_reward, sample_rewards
from trainer.runlog import completion_line
from trainer.services import Rewarder, RewardFailure

TEXTS = [("source one", "열기 bad"), ("source two", "저장")]


class Recorder(FakeBackend):
    """Keeps the samples that were asked for; `nan` in a text fails it, `long` is overlong."""

    def __init__(self, service: Any = "metricx", *, higher: bool | None = None) -> None:
        super().__init__(service)
        self.samples: list[TranslationSample] = []
        self.higher = higher

    def load(self) -> Description:
        description = super().load()
        if self.higher is not None:
            description.higher_is_better = self.higher
        return description

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        self.samples += samples
        encoded = super().encode(samples, options)
        for place, sample in enumerate(samples):
            if "long" in sample.mt:
                encoded[place] = SampleError("overlong", "too long")
            elif "half" in sample.mt:
                encoded[place].fields["mt_covered"] = len(sample.mt) // 2  # type: ignore[union-attr]
        return encoded


class Services:
    def __init__(self, metricx: Recorder, xcomet: Recorder, urls: tuple[str, str]) -> None:
        self.metricx, self.xcomet = metricx, xcomet
        self.urls = {"metricx_urls": urls[0], "xcomet_urls": urls[1]}

    def config(self, **changes: Any) -> RewardConfig:
        return RewardConfig(**(self.urls | {"deadline_s": 2.0} | changes))


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    metricx, xcomet = Recorder("metricx"), Recorder("xcomet")
    with running_service(metricx) as m, running_service(xcomet) as x:
        yield Services(metricx, xcomet, (m, x))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METRICX_URL", raising=False)
    monkeypatch.delenv("XCOMET_URL", raising=False)


def rewards_of(cfg: RewardConfig, *texts: str, finish_reason: str = "eos") -> Any:
    rollouts = [
        rollout(
            [1], [5] * (len(text) + 1), text, src_text=f"source of {text}",
            token_char_offsets=[*((i, i + 1) for i in range(len(text))), (len(text), len(text))],
            finish_reason=finish_reason,
        )
        for text in texts
    ]  # fmt: skip
    rewarder = Rewarder(cfg)
    try:
        scores = rewarder.score([(r.src_text, r.completion_text) for r in rollouts])
    finally:
        rewarder.close()
    return sample_rewards(rollouts, scores, cfg)


def metricx_of(text: str) -> float:
    return fake_score(TranslationSample(src=f"source of {text}", mt=text), 25.0)


def test_metricx_reward_is_5_minus_score() -> None:
    assert metricx_reward(3.25) == 1.75
    assert metricx_reward(3.25, offset=2.0) == -1.25


def test_requests_never_carry_a_reference(services: Services) -> None:
    services.metricx.samples.clear()
    services.xcomet.samples.clear()
    rewards_of(services.config(), "열기", "저장")
    for backend in (services.metricx, services.xcomet):
        assert [sample.mt for sample in backend.samples] == ["열기", "저장"]
        assert all(sample.ref is None for sample in backend.samples)


def test_the_reward_is_the_weighted_sum(services: Services) -> None:
    cfg = services.config(w_metricx=2.0, w_xcomet_seq=3.0, xcomet_seq_scale=0.5, w_xcomet_span=0.1)
    first, second = rewards_of(cfg, "열 bad", "저장")
    for reward, text in ((first, "열 bad"), (second, "저장")):
        sample = TranslationSample(src=f"source of {text}", mt=text)
        xcomet = fake_score(sample, 1.0)
        assert reward.metricx_score == pytest.approx(metricx_of(text))
        assert reward.xcomet_score == pytest.approx(xcomet)
        assert reward.r_seq == pytest.approx(2.0 * (5.0 - metricx_of(text)) + 1.5 * xcomet)
    severity = fake_spans("열 bad")[0]["severity"]
    penalty = 0.1 * cfg.severity_weights.model_dump()[severity]
    assert first.token_rewards == pytest.approx([0, 0, penalty, penalty, penalty, 0])
    assert second.token_rewards == [0, 0, 0]


def test_a_reward_of_weight_0_needs_no_service(services: Services) -> None:
    """Neither a URL nor an answer, and nothing is asked of one that has both."""
    (reward,) = rewards_of(services.config(w_metricx=0, metricx_urls=""), "열기")
    assert (reward.metricx_score, reward.r_seq) == (None, 0.0)
    (reward,) = rewards_of(services.config(w_xcomet_span=0, xcomet_urls=[]), "열기")
    assert (reward.xcomet_score, reward.error_spans) == (None, None)
    services.xcomet.samples.clear()
    no_weights = {"MINOR": 0, "MAJOR": 0, "CRITICAL": 0}
    rewards_of(services.config(severity_weights=no_weights), "열기")
    assert services.xcomet.samples == []
    dead = f"http://127.0.0.1:{free_port()}"
    rewards_of(services.config(w_metricx=0, metricx_urls=dead), "열기")


def test_a_failed_score_is_dropped_and_never_0(services: Services) -> None:
    cfg = services.config()
    rewards = rewards_of(cfg, "열기", "nan", "저장")
    assert [reward.r_seq is None for reward in rewards] == [False, True, False]
    assert "non_finite" in rewards[1].service_error
    figures = reward_figures(rewards, cfg)
    scores = [metricx_of("열기"), metricx_of("저장")]
    assert figures["metricx_score_mean"] == pytest.approx(sum(scores) / 2)
    assert figures["metricx_reward_mean"] == pytest.approx(5 - sum(scores) / 2)
    assert figures["metricx_coverage"] == pytest.approx(2 / 3)
    assert figures["reward_coverage"] == pytest.approx(2 / 3)
    assert figures["r_seq_mean"] == pytest.approx(5 - sum(scores) / 2)


def test_on_failure_fail_ends_the_run(services: Services) -> None:
    with pytest.raises(RewardFailure, match="metricx: non_finite"):
        rewards_of(services.config(on_failure="fail"), "열기", "nan")


def test_the_texts_own_fault_has_a_price(services: Services) -> None:
    cfg = services.config(text_error_reward=-30.0)
    fine, faulty = rewards_of(cfg, "열기", "long")
    assert faulty.r_seq == -30.0
    assert faulty.token_rewards == [0.0] * 5
    assert faulty.text_error == "xcomet: overlong"
    figures = reward_figures([fine, faulty], cfg)
    assert figures["text_errors"] == 1
    assert figures["metricx_score_mean"] == pytest.approx(metricx_of("열기"))
    assert figures["reward_coverage"] == 1.0


def test_tokens_behind_what_xcomet_read_are_not_valid(services: Services) -> None:
    (reward,) = rewards_of(services.config(), "half half")
    assert reward.valid == [True] * 4 + [False] * 6
    assert reward_figures([reward], services.config())["uncovered_tokens"] == 6


def test_a_completion_without_an_end_is_penalised(services: Services) -> None:
    (cut,) = rewards_of(services.config(no_eos_penalty=7.0), "저장", finish_reason="length")
    assert cut.r_seq == pytest.approx(5 - metricx_of("저장") - 7)


def test_a_service_that_dies_drops_the_batch() -> None:
    with running_service(FakeBackend("metricx")) as url:
        rewarder = Rewarder(RewardConfig(metricx_urls=[url], w_xcomet_span=0, deadline_s=0.5))
    results = rewarder.score(TEXTS).results["metricx"]
    rewarder.close()
    assert [result.ok for result in results] == [False, False]
    assert {result.error.type for result in results if not result.ok} == {"upstream"}


def test_urls_from_the_environment(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICX_URL", services.urls["metricx_urls"])
    monkeypatch.setenv("XCOMET_URL", services.urls["xcomet_urls"])
    rewarder = Rewarder(RewardConfig())
    assert set(rewarder.infos) == set(services.urls.values())
    rewarder.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metricx_urls": []}, "reward.metricx_urls is empty"),
        ({"metricx_model_name": "google/other"}, "runs 'fake-metricx', but reward.metricx_model"),
        ({"metricx_tokenizer_name": "t"}, "reward.metricx_tokenizer_name is 't'"),
        ({"xcomet_model_name": "Unbabel/XCOMET-XL"}, "runs 'fake-xcomet'"),
        ({"metricx_urls": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        ({"metricx_urls": "no_such_module:Scorer"}, "cannot be loaded"),
        ({"metricx_urls": "localhost:8001"}, "'localhost:8001': a URL begins with http://"),
        ({"max_input_length": 100_000}, "tokens, but reward.max_input_length is 100000"),
    ],
)
def test_services_are_checked_first(services: Services, changes: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        Rewarder(services.config(**changes))
    assert told in str(error.value)


def test_swapped_and_reversed_services_are_refused(services: Services) -> None:
    swapped = services.config(metricx_urls=services.urls["xcomet_urls"])
    with pytest.raises(UserError, match="is a xcomet service"):
        Rewarder(swapped)
    with (
        running_service(Recorder("metricx", higher=True)) as url,
        pytest.raises(UserError, match="higher_is_better=True"),
    ):
        Rewarder(services.config(metricx_urls=url))


class OtherRevision(Recorder):
    def load(self) -> Description:
        return replace(super().load(), revision="other")


def test_urls_of_one_service_must_agree(services: Services) -> None:
    same = services.urls["metricx_urls"]
    with running_service(OtherRevision("metricx")) as url:
        with pytest.raises(UserError) as error:
            Rewarder(services.config(metricx_urls=[same, url]))
    for told in (same, url, "revision", "'other'"):
        assert told in str(error.value)
    with running_service(Recorder("metricx")) as url:
        Rewarder(services.config(metricx_urls=[same, url])).close()


class Dying(Recorder):
    """Answers, but has an error for each sample."""

    def encode(self, samples: Any, options: Any) -> Any:
        if samples[0].src.startswith("word "):  # the warm-up's
            return super().encode(samples, options)
        raise RuntimeError("out of order")


@pytest.mark.parametrize("how", ["stopped", "broken", "in process"])
def test_a_service_that_is_only_shown_never_ends_a_run(
    services: Services, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    shown = {"metricx_urls": f"{__name__}:BrokenScorer", "metricx_scorer_args": {}}
    with running_service(Dying("metricx") if how == "broken" else Recorder("metricx")) as url:
        if how != "in process":
            shown = {"metricx_urls": url}
        cfg = services.config(w_metricx=0, on_failure="fail", **shown)
        rewarder = Rewarder(cfg)
        if how == "broken":
            results = rewarder.score(TEXTS, rewarder.available).results
    if how != "broken":
        rewarder.scoring = ScoringConfig(cache=False)
        results = rewarder.score(TEXTS, rewarder.available).results
    assert [result.ok for result in results["metricx"]] == [False, False]
    assert [result.ok for result in results["xcomet"]] == [True, True]
    if how == "broken":  # it answers: each sample has its own error
        rewarder.close()
        return
    assert rewarder.available == ("xcomet",)
    assert "metricx" not in rewarder.score(TEXTS, rewarder.available).results
    rewarder.close()
    assert caplog.text.count("evaluations go without metricx") == 1


def test_a_scorer_that_is_only_shown_may_fail_to_open(services: Services) -> None:
    shown = {"metricx_urls": f"{__name__}:LengthScorer", "metricx_scorer_args": {"wrong": 1}}
    with pytest.raises(TypeError):
        Rewarder(services.config(**shown))
    rewarder = Rewarder(services.config(w_metricx=0, **shown))
    assert rewarder.available == ("xcomet",)
    rewarder.close()


class Truncating(Recorder):
    """Cuts each text with `cut`."""

    def encode(self, samples: Any, options: Any) -> Any:
        encoded = super().encode(samples, options)
        for place, sample in enumerate(samples):
            if "cut" in sample.mt:
                encoded[place].fields["truncated"] = {"src": False, "mt": True}
        return encoded


def test_what_a_model_could_not_read_is_logged(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    with running_service(Truncating("metricx")) as url:
        cfg = services.config(metricx_urls=url, w_xcomet_span=0)
        rewards = rewards_of(cfg, "cut", "b", "nan cut")
    assert [reward.metricx_truncated for reward in rewards] == [True, False, None]
    assert rewards[0].xcomet_truncated is None
    figures = reward_figures(rewards, cfg)
    assert figures["metricx_truncated_frac"] == 0.5
    assert figures["xcomet_truncated_frac"] is None
    assert figures["xcomet_coverage"] is None  # never asked: not 0
    assert "metricx could not read 1 of 2 samples" in caplog.text
    line = completion_line(rollout([1], [2]), rewards[0])
    assert (line["metricx_truncated"], line["xcomet_truncated"]) == (True, None)


def test_a_wrong_key_is_no_reason_to_drop_samples() -> None:
    secrets = Secrets(api_keys=SecretStr("right"))
    with running_service(FakeBackend("metricx"), secrets) as url:
        with pytest.raises(UserError, match="unauthorized"):
            Rewarder(RewardConfig(metricx_urls=[url], w_xcomet_span=0))


def test_a_refusal_for_good_is_raised(services: Services) -> None:
    cfg = services.config(w_xcomet_span=0, max_input_length=16)
    rewarder = Rewarder(cfg)
    rewarder.scoring = ScoringConfig.model_construct(**{**dict(rewarder.scoring), "overlong": "x"})
    with pytest.raises(RequestError):
        rewarder.score(TEXTS)
    rewarder.close()


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
                        "id": None, "ok": True, "score": self.factor * len(s.mt), "tokens": 1,
                        "truncated": {"src": False, "mt": False}, "mt_covered": len(s.mt),
                        "cached": False,
                    }
                )
                for s in samples
            ]
        )  # fmt: skip


class BrokenScorer(LengthScorer):
    def score_batch(self, *_: Any) -> RewardOutput:
        raise ZeroDivisionError


class DescribedScorer(LengthScorer):
    description = FakeBackend("metricx").load()


def test_a_scorer_in_this_process_is_held_to_the_expectations() -> None:
    def opened(scorer: str, **changes: Any) -> None:
        Rewarder(
            RewardConfig(metricx_urls=[f"{__name__}:{scorer}"], w_xcomet_span=0, **changes)
        ).close()

    opened("DescribedScorer", metricx_model_name="fake-metricx")
    with pytest.raises(UserError, match=r"runs 'fake-metricx', but reward.metricx_model_name"):
        opened("DescribedScorer", metricx_model_name="google/other")
    with pytest.raises(UserError, match=r"set reward.metricx_model_name to null"):
        opened("LengthScorer", metricx_model_name="fake-metricx")


def test_a_scorer_in_this_process() -> None:
    cfg = RewardConfig(
        metricx_urls=f"{__name__}:LengthScorer",  # type: ignore[arg-type]
        metricx_scorer_args={"factor": 2.0},
        w_xcomet_span=0,
    )
    (reward,) = rewards_of(cfg, "저장")
    assert reward.r_seq == 5.0 - 4.0
