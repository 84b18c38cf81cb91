"""Check the sections of the config: the importance correction, and the URLs of vLLM servers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from scorekit.config import check_config, load_config
from scorekit.errors import UserError
from trainer.rl.algorithms.algorithm import ImportanceCorrection
from trainer.rl.config import RLConfig, SamplingConfig, VLLMConfig


def config(**settings: Any) -> RLConfig:
    return RLConfig.model_validate(settings)


def test_the_defaults_of_each_algorithm() -> None:
    assert config().correction == ImportanceCorrection("token_truncate", 2.0, 0.5, 20.0)
    for algorithm, mode in (
        ("ppo", "token_truncate"),
        ("reinforce", "token_truncate"),
        ("gspo", "sequence_truncate"),
    ):
        cfg = config(algorithm=algorithm)
        assert cfg.importance_mode == mode
        assert RLConfig.model_validate(cfg.model_dump()) == cfg  # as a resumed run reads it


def test_the_lower_bound_of_a_mask_is_the_inverse_of_the_upper_one_unless_it_is_named() -> None:
    assert config(importance_mode="token_mask", importance_cap=4).correction.floor == 0.25
    named = config(importance_mode="token_mask", importance_floor=0.1, importance_cap=4)
    assert named.correction == ImportanceCorrection("token_mask", 4.0, 0.1, 20.0)
    assert config(importance_mode="sequence_mask", importance_floor=0).correction.floor == 0
    only_one = config(importance_mode="token_mask", importance_floor=1, importance_cap=1)
    assert (only_one.correction.floor, only_one.correction.cap) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"importance_floor": 0.5},
            "importance_floor 0.5: token_truncate has no lower bound. Set importance_mode to "
            "token_mask",
        ),
        (
            {"algorithm": "gspo", "importance_floor": 0.5},
            "Set importance_mode to sequence_mask",
        ),
        (
            {"importance_mode": "token_mask", "importance_cap": 0.9},
            "importance_cap 0.9: token_mask would mask every sample of the current policy",
        ),
        (
            {"importance_mode": "sequence_mask", "importance_correction": "off"},
            "importance_mode sequence_mask: importance_correction is off",
        ),
        (
            {"importance_mode": "sequence_truncate", "importance_correction": "off"},
            "importance_mode sequence_truncate: importance_correction is off",
        ),
        (
            {"algorithm": "gspo", "importance_mode": "token_mask"},
            "importance_mode token_mask: gspo weighs all tokens of a sequence the same. Set "
            "sequence_mask",
        ),
        (
            {"algorithm": "gspo", "importance_mode": "token_truncate"},
            "Set sequence_truncate, or another algorithm",
        ),
        ({"importance_mode": "token"}, "importance_mode"),
        ({"importance_mode": "token_mask", "importance_floor": 1.5}, "importance_floor"),
        (
            {"max_staleness": 3, "importance_correction": "off"},
            "importance_correction off: with max_staleness 3 older weights sample",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as error:
        config(**settings)
    assert len(error.value.errors()) == 1
    assert message in str(error.value)


def test_what_does_not_contradict_is_accepted() -> None:
    config(importance_correction="off", importance_mode="token_truncate")
    config(importance_correction="off", algorithm="gspo")
    config(importance_cap=0.5)
    config(max_staleness=3, importance_correction="on", importance_mode="sequence_truncate")


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        (None, []),
        ("http://a:1", ["http://a:1"]),
        ("http://a:1, http://b:2", ["http://a:1", "http://b:2"]),
        (["http://a:1", "http://b:2/v1"], ["http://a:1", "http://b:2/v1"]),
    ],
)
def test_one_url_or_several_may_be_given(url: str | list[str] | None, urls: list[str]) -> None:
    assert VLLMConfig(url=url).urls == urls


def test_urls_are_read_from_the_command_line() -> None:
    overrides = ["engine=vllm", "vllm.url=http://a:1,http://b:2"]
    assert load_config(SamplingConfig, None, overrides).vllm.urls == ["http://a:1", "http://b:2"]
    overrides[1] = "vllm.url=[http://a:1,http://b:2]"
    assert load_config(SamplingConfig, None, overrides).vllm.urls == ["http://a:1", "http://b:2"]


def test_a_server_that_is_listed_twice_is_refused() -> None:
    data = {"url": ["http://a:1", "http://b:2", "http://a:1/v1/"]}
    with pytest.raises(UserError, match="url: http://a:1 is listed twice"):
        check_config(VLLMConfig, data, "config")


@pytest.mark.parametrize("url", [None, []])
def test_the_vllm_engine_needs_a_url(url: list[str] | None) -> None:
    with pytest.raises(UserError, match="engine vllm: give"):
        check_config(SamplingConfig, {"engine": "vllm", "vllm": {"url": url}}, "config")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (["http://a:1", ""], "url: '' is not the URL of a service"),
        ("a b c", "url: 'a b c' is not the URL of a service"),
        (["ftp://a:1", "http://b:2"], "url: 'ftp://a:1' is not the URL of a service"),
        ([" http://a:1", "http://a:1/v1/ "], "url: http://a:1 is listed twice"),
    ],
)
def test_each_url_of_vllm_is_the_url_of_another_server(url: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        check_config(SamplingConfig, {"engine": "vllm", "vllm": {"url": url}}, "config")
    assert "\n" not in str(caught.value)


def test_spaces_around_a_url_are_left_out() -> None:
    for url in (" http://a:1 ", [" http://a:1"], " , http://a:1 ,"):
        values = {"engine": "vllm", "vllm": {"url": url}}
        assert check_config(SamplingConfig, values, "config").vllm.urls == ["http://a:1"]


def test_the_staleness_is_bounded() -> None:
    with pytest.raises(UserError, match=r"max_staleness: .* less than or equal to 100"):
        check_config(RLConfig, {"max_staleness": 10**6}, "config")
