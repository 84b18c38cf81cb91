"""Test sources that no service can score: reported with their row, never charged to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import SampleError, UserError
from scorekit.server.app import create_app
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, running_service, wait_ready
from tests.kits.trainer.rewards import Recorder, Services, Switch
from tests.kits.trainer.runs import byte_level_tokenizer, rollout, save_policy, write_examples
from trainer.translation.check import check_run
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.evaluation.stats import reward_stats
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards
from trainer.translation.rewards.screening import bad_sources
from trainer.translation.rewards.services import RewardClient
from trainer.translation.train import train_translation

NUL, LONG, FINE = "Open \0 it.", "word " * 40, "Open it."


class Limited(Recorder):
    """A scorer that reads 30 words of source and translation together, if it may not cut."""

    def encode(self, samples: Any, options: Any) -> Any:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            words = len(sample.src.split()) + len(sample.mt.split())
            if options.overlong == "error" and words > 30 and not sample.mt.startswith("말"):
                encoded[index] = SampleError("overlong", f"{words} words")
        return encoded


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    metricx, xcomet = Limited("metricx"), Recorder("xcomet")
    with running_service(metricx) as m, running_service(xcomet) as x:
        yield Services(metricx, xcomet, (m, x))


def rewards_of(services: Services, *texts: tuple[str, str], **changes: Any) -> list[SampleReward]:
    cfg = services.config(**changes)
    rollouts = [rollout([1], [5], mt, src_text=src) for src, mt in texts]
    with closing(RewardClient(cfg)) as rewarder:
        return compute_rewards(rollouts, rewarder.score(list(texts)), cfg)


def test_a_fault_of_the_source_is_not_charged_to_the_policy(services: Services) -> None:
    """Check a NUL and a long source; the translation's own errors have their price."""
    texts = [
        (NUL, "열기"),
        (LONG, "열기"),
        (FINE, "열기"),
        (FINE, "말을 " * 3 + "\0"),
        (FINE, "열기 " * 40),
    ]
    nul, overlong, fine, own_nul, own_length = rewards_of(services, *texts, overlong="penalty")
    assert nul.r_seq is overlong.r_seq is None
    assert nul.text_error is overlong.text_error is overlong.overlong is None
    assert nul.source_error == "xcomet: bad_source: invalid_input: src: NUL character at position 5"
    assert overlong.source_error == "metricx: bad_source: overlong: 41 words"
    assert fine.r_seq is not None and fine.r_seq > -20.1 and fine.source_error is None
    assert own_nul.r_seq == own_length.r_seq == -20
    assert own_length.overlong == "penalised"
    stats = reward_stats([nul, overlong, fine, own_nul, own_length], services.config())
    assert (stats["source_errors"], stats["text_errors"]) == (2, 2)
    assert stats["reward_coverage"] == 3 / 5


def test_a_source_at_fault_does_not_end_a_run_that_ends_at_failures(services: Services) -> None:
    nul, fine = rewards_of(services, (NUL, "열기"), (FINE, "열기"), on_failure="fail")
    assert nul.r_seq is None and fine.r_seq is not None


def test_a_service_is_asked_for_a_source_once(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RewardClient(services.config(overlong="penalty", w_xcomet_span=0))) as rewarder:
        for text in ("열기", "저장", "열기"):
            rewarder.score([(LONG, text)])
        services.metricx.samples.clear()
        rewarder.score([(LONG, "새로")])
        assert [sample.mt for sample in services.metricx.samples] == ["새로"]
    assert caplog.text.count("no translation of 1 sources can be scored (overlong: 41 words)") == 1


@pytest.mark.usefixtures("no_second_try")
def test_a_service_that_leaves_meanwhile_blames_nobody() -> None:
    """Check that the cause is unknown then: no score, and no price."""
    switch = Switch(create_app(Limited("metricx"), ServiceSettings(cache="memory")))
    switch.down = lambda body: '"mt":"."' in body  # asked only to find the cause
    with running_app(switch) as url:
        wait_ready(url)
        cfg = RewardConfig(metricx_urls=[url], overlong="penalty", w_xcomet_span=0)
        with closing(RewardClient(cfg)) as rewarder:
            scores = rewarder.score([(LONG, "열기")])
            (reward,) = compute_rewards([rollout([1], [5], "열기", src_text=LONG)], scores, cfg)
            assert reward.r_seq is None and reward.text_error is reward.source_error is None
            assert reward.service_error is not None and "upstream" in reward.service_error
            switch.down = lambda body: False  # nothing was kept of that
            scores = rewarder.score([(LONG, "열기")])
            (reward,) = compute_rewards([rollout([1], [5], "열기", src_text=LONG)], scores, cfg)
    assert switch.refused == 1 and reward.source_error is not None and reward.r_seq is None


@pytest.mark.parametrize(
    ("overlong", "expected_sources"), [("truncate", {NUL}), ("skip", {NUL, LONG})]
)
def test_sources_are_found_before_training(
    services: Services, overlong: str, expected_sources: set[str]
) -> None:
    """Check that only those are requested that a service might refuse."""
    sources = [FINE, NUL, "word " * 20, LONG, *(f"Open {n}." for n in range(100))]
    cfg = services.config(overlong=overlong, max_input_length=64, w_xcomet_span=0)
    services.metricx.samples.clear()
    with closing(RewardClient(cfg)) as rewarder:
        assert bad_sources(sources, rewarder).keys() == expected_sources
    requested_sources = {sample.src for sample in services.metricx.samples}
    assert requested_sources == ({"word " * 20, LONG} if overlong == "skip" else set())


@pytest.fixture
def settings(tmp_path: Path, services: Services) -> list[str]:
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    train = write_examples(tmp_path / "train.jsonl", [FINE, "Save it.", NUL, "Close it.", NUL])
    held_out = write_examples(tmp_path / "eval.jsonl", [FINE, NUL])
    return [
        f"policy.path={tmp_path}/policy",
        f"data.train={train}",
        f"data.eval={held_out}",
        "generation.prompt_template=source",
        "generation.max_new_tokens=4",
        "rl.num_updates=1",
        "rl.batch_size=3",
        "misc.device=cpu",
        f"misc.run_dir={tmp_path}/out",
        *(f"reward.{key}={url}" for key, url in services.urls.items()),
    ]


def run(settings: list[str], *overrides: str) -> Any:
    cfg = load_config(TranslationConfig, None, [*settings, *overrides])
    train, held_out = (load_examples(path) for path in (cfg.data.train, cfg.data.eval) if path)
    return train_translation(train, held_out, cfg)


def test_a_run_leaves_them_out_and_says_which(
    settings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts = run(settings)
    assert (artifacts.updates[0]["source_errors"], artifacts.updates[0]["text_errors"]) == (0, 0)
    assert [report.source_errors for _, report in artifacts.reports] == [1, 1]
    assert "data.train: 2 of 5 sources cannot be scored with any translation: " in caplog.text
    assert f"{tmp_path}/train.jsonl line 3 (" in caplog.text
    assert f"{tmp_path}/train.jsonl line 5 (" in caplog.text
    assert "src: NUL character at position 5); left out" in caplog.text
    assert "data.eval: 1 of 2 sources" in caplog.text and "they have no score" in caplog.text


def test_a_run_may_refuse_them(settings: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.jsonl line 3 .*data.bad_sources"):
        run(settings, "data.bad_sources=refuse")
    assert not (tmp_path / "out" / "log.jsonl").exists()
    write_examples(tmp_path / "train.jsonl", [NUL])
    with pytest.raises(UserError, match="1 of 1 sources cannot be scored"):
        run(settings)


def test_check_tells_them_too(settings: list[str]) -> None:
    def check_sources(*overrides: str) -> tuple[str, bool]:
        cfg = load_config(TranslationConfig, None, [*settings, *overrides])
        ((message, ok),) = [(c.result, c.ok) for c in check_run(cfg).checks if c.name == "sources"]
        return message, ok

    assert check_sources() == ("2 cannot be scored", True)
    message, ok = check_sources("data.bad_sources=refuse")
    assert not ok and "data.train: 2 of 5 sources cannot be scored" in message
