"""Test rewards over real HTTP: no references, no zeros for failures, no needless service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from scorekit.client import SyncScoringClient
from scorekit.errors import SampleError, UserError
from scorekit.schemas import ErrorSpan, Scored, TranslationSample, Truncated
from scorekit.scorers import RewardOutput
from scorekit.server.fake import fake_score, fake_spans
from testing.servers import free_port, running_service
from tests.kits.trainer.rewards import Recorder, Services, reward_services, rewards_of
from tests.kits.trainer.runs import rollout
from trainer.translation.dumps import completion_line
from trainer.translation.evaluation.stats import reward_stats
from trainer.translation.rewards import metricx_reward
from trainer.translation.rewards.reward_batch import RewardFailure
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with reward_services() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METRICX_URL", raising=False)
    monkeypatch.delenv("XCOMET_URL", raising=False)


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
        assert reward.score("metricx") == pytest.approx(metricx_of(text))
        assert reward.score("xcomet") == pytest.approx(xcomet)
        assert reward.r_seq == pytest.approx(2.0 * (5.0 - metricx_of(text)) + 1.5 * xcomet)
    severity = fake_spans("열 bad")[0]["severity"]
    penalty = 0.1 * cfg.severity_weights.model_dump()[severity]
    assert first.token_rewards == pytest.approx([0, 0, penalty, penalty, penalty, 0])
    assert second.token_rewards == [0, 0, 0]
    stats = reward_stats([first, second], cfg)
    assert stats["reward_mean"] == pytest.approx(stats["r_seq_mean"] + 3 * penalty / 6 / 2)


def test_a_reward_of_weight_0_needs_no_service(services: Services) -> None:
    """Check that no URL and no answer are needed, and that a configured service gets no request."""
    (reward,) = rewards_of(services.config(w_metricx=0, metricx_urls=""), "열기")
    assert (reward.score("metricx"), reward.r_seq) == (None, 0.0)
    (reward,) = rewards_of(services.config(w_xcomet_span=0, xcomet_urls=[]), "열기")
    assert (reward.score("xcomet"), reward.error_spans) == (None, None)
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
    stats = reward_stats(rewards, cfg)
    scores = [metricx_of("열기"), metricx_of("저장")]
    assert stats["metricx_score_mean"] == pytest.approx(sum(scores) / 2)
    assert stats["metricx_reward_mean"] == pytest.approx(5 - sum(scores) / 2)
    assert stats["metricx_coverage"] == pytest.approx(2 / 3)
    assert stats["reward_coverage"] == pytest.approx(2 / 3)
    assert stats["r_seq_mean"] == pytest.approx(5 - sum(scores) / 2)


@pytest.mark.parametrize("translation", ["nan", "long"])
def test_a_service_without_weight_that_fails_costs_no_reward(
    services: Services, translation: str
) -> None:
    """Check this for an evaluation, too, which does request the score."""
    cfg = services.config(w_xcomet_span=0)
    with closing(RewardClient(cfg)) as rewarder:
        scores = rewarder.score([("source of 열기", "열기")], rewarder.available)
        scores.results |= rewarder.score([("source", translation)], ["xcomet"]).results
    (reward,) = compute_rewards([rollout([1], [5], "열기")], scores, cfg)
    assert reward.r_seq == pytest.approx(5 - metricx_of("열기"))
    assert reward.text_error is reward.service_error is reward.overlong is None
    assert reward.unweighted_error is not None and reward.unweighted_error.startswith("xcomet: ")


def test_on_failure_fail_ends_the_run(services: Services) -> None:
    with pytest.raises(RewardFailure, match="metricx: non_finite"):
        rewards_of(services.config(on_failure="fail"), "열기", "nan")


def test_the_texts_own_fault_has_a_price(services: Services) -> None:
    cfg = services.config(text_error_reward=-30.0)
    fine, faulty = rewards_of(cfg, "열기", "long")
    assert faulty.r_seq == -30.0
    assert faulty.token_rewards == [0.0] * 5
    assert faulty.text_error == "xcomet: overlong"
    stats = reward_stats([fine, faulty], cfg)
    assert stats["text_errors"] == 1
    assert stats["metricx_score_mean"] == pytest.approx(metricx_of("열기"))
    assert stats["reward_coverage"] == 1.0


def test_tokens_behind_what_xcomet_read_are_not_valid(services: Services) -> None:
    (reward,) = rewards_of(services.config(), "half half")
    assert reward.valid == [True] * 4 + [False] * 6
    assert reward_stats([reward], services.config())["uncovered_tokens"] == 6


def test_tokens_behind_what_xcomet_read_may_get_the_sequence_reward(services: Services) -> None:
    (reward,) = rewards_of(services.config(uncovered="sequence_only"), "half half")
    (excluded,) = rewards_of(services.config(uncovered="exclude"), "half half")
    assert reward.valid == [True] * 10
    assert (reward.r_seq, reward.token_rewards) == (excluded.r_seq, excluded.token_rewards)
    assert reward_stats([reward], services.config())["uncovered_tokens"] == 6


def test_a_completion_without_an_end_is_penalised(services: Services) -> None:
    (cut,) = rewards_of(services.config(no_eos_penalty=7.0), "저장", finish_reason="length")
    assert cut.r_seq == pytest.approx(5 - metricx_of("저장") - 7)


class Truncating(Recorder):
    """A scorer that cuts each text with `cut`."""

    def encode(self, samples: Any, options: Any) -> Any:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if "cut" in sample.mt:
                encoded[index].fields["truncated"] = {"src": False, "mt": True}
        return encoded


def test_what_a_model_could_not_read_is_logged(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    with running_service(Truncating("metricx")) as url:
        cfg = services.config(metricx_urls=url, w_xcomet_span=0)
        rewards = rewards_of(cfg, "cut", "b", "nan cut")
    assert [reward.truncated("metricx") for reward in rewards] == [True, False, None]
    assert rewards[0].truncated("xcomet") is None
    stats = reward_stats(rewards, cfg)
    assert stats["metricx_truncated_frac"] == 0.5
    assert stats["xcomet_truncated_frac"] is None
    assert stats["xcomet_coverage"] is None  # never requested: not 0
    assert "metricx could not read 1 of 2 samples" in caplog.text
    line = completion_line(rollout([1], [2]), rewards[0])
    assert (line["metricx_truncated"], line["xcomet_truncated"]) == (True, None)


class Limited(Recorder):
    """A scorer with a limit of 10 characters: cut with `truncate`, refused with `error`."""

    def encode(self, samples: Any, options: Any) -> Any:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if sample.src.startswith("word ") or len(sample.mt) <= 10:  # of the warm-up, or short
                continue
            if options.overlong == "error":
                encoded[index] = SampleError("overlong", "too many tokens")
            else:
                encoded[index].fields["truncated"] = {"src": False, "mt": True}
        return encoded


@pytest.mark.parametrize(
    ("overlong", "fate"),
    [("truncate", "truncated"), ("skip", "skipped"), ("penalty", "penalised")],
)
def test_an_overlong_text_is_cut_or_skipped_or_has_a_price(
    services: Services, overlong: str, fate: str
) -> None:
    text = "저장" * 6
    with running_service(Limited("metricx")) as url:
        cfg = services.config(
            metricx_urls=url, overlong=overlong, text_error_reward=-30.0, w_xcomet_span=0
        )
        fine, over = rewards_of(cfg, "열기", text)
    expected_rewards = {
        "truncate": pytest.approx(5 - metricx_of(text)),
        "skip": None,
        "penalty": -30.0,
    }
    assert over.r_seq == expected_rewards[overlong]
    assert (fine.overlong, over.overlong) == (None, fate)
    assert over.service_error is None
    stats = reward_stats([fine, over], cfg)
    for name in ("truncated", "skipped", "penalised"):
        assert stats[f"overlong_{name}"] == (name == fate)
    assert stats["text_errors"] == (overlong != "truncate")
    assert stats["reward_coverage"] == (0.5 if overlong == "skip" else 1.0)
    assert stats["metricx_coverage"] == (1.0 if overlong == "truncate" else 0.5)
    if overlong == "skip":  # not in the mean
        assert stats["r_seq_mean"] == pytest.approx(fine.r_seq)


def test_an_overlong_text_is_scored_whole_in_windows(services: Services) -> None:
    text = "열기는 뜨겁다. bad 물은 차갑다. " * 6
    truncated, windowed = (
        rewards_of(services.config(overlong=overlong, max_input_length=16), text, "열 bad")
        for overlong in ("truncate", "windows")
    )
    assert (truncated[0].overlong, windowed[0].overlong, windowed[1].overlong) == (
        "truncated",
        "windowed",
        None,
    )
    assert truncated[1].r_seq == windowed[1].r_seq  # it is short enough
    (answer,) = _in_windows(services.urls["metricx_urls"], f"source of {text}", text)
    assert len(answer.windows) > 4
    assert windowed[0].r_seq == pytest.approx(5 - answer.score) != truncated[0].r_seq
    assert windowed[0].score("metricx") == pytest.approx(answer.score)
    assert windowed[0].valid == [True] * (len(text) + 1)
    charged = [
        index for index, token_reward in enumerate(windowed[0].token_rewards) if token_reward < 0
    ]
    assert charged == [index for index, letter in enumerate(text) if letter in "bad"]
    cfg = services.config(overlong="windows", max_input_length=16)
    stats = reward_stats(windowed, cfg)
    assert stats["reward_coverage"] == stats["metricx_coverage"] == 1.0
    fates = {fate: stats[f"overlong_{fate}"] for fate in ("truncated", "windowed", "skipped")}
    assert fates == {"truncated": 0, "windowed": 1, "skipped": 0}


def _in_windows(url: str, src: str, mt: str) -> list[Any]:
    with SyncScoringClient(url) as client:
        options = {"overlong": "windows", "max_input_length": 16}
        return list(client.score([{"src": src, "mt": mt}], options))


def test_an_invalid_text_has_its_price_also_where_overlong_ones_are_skipped(
    services: Services,
) -> None:
    class Refusing(Recorder):
        def encode(self, samples: Any, options: Any) -> Any:
            encoded = super().encode(samples, options)
            for index, sample in enumerate(samples):
                if "long" in sample.mt:
                    encoded[index] = SampleError("invalid_input", "no")
            return encoded

    with running_service(Refusing("metricx")) as url:
        (both,) = rewards_of(services.config(metricx_urls=url, overlong="skip"), "long")
    assert (both.r_seq, both.text_error) == (-20.0, "metricx: invalid_input")


def test_an_unknown_severity_is_told_or_has_a_weight(services: Services) -> None:
    def token_rewards(**weights: float) -> Any:
        scorer = {"xcomet_urls": f"{__name__}:OddSeverity", "w_metricx": 0}
        (reward,) = rewards_of(services.config(**scorer, severity_weights=weights), "저장")
        return reward.token_rewards

    with pytest.raises(UserError, match=r"'Neutral'.*severity_weights\.UNKNOWN"):
        token_rewards()
    assert token_rewards(unknown=-0.5) == [-0.5, -0.5, 0]


class OddSeverity:
    """A scorer in this process with an unknown severity."""

    def score_batch(self, samples: Any, cfg: Any = None) -> RewardOutput:
        span = ErrorSpan.model_construct(
            start=0, end=2, severity="Neutral", confidence=1.0, text="저장"
        )
        truncated = Truncated(src=False, mt=False)
        result = Scored.model_construct(
            ok=True, score=1.0, truncated=truncated, mt_covered=2, error_spans=[span]
        )
        return RewardOutput([1.0], [result])
