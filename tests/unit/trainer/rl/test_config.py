"""The sections of trainer/rl/config.py: how the URLs of vLLM servers are written."""

from __future__ import annotations

import pytest

from scorekit.config import check_config, load_config
from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig, VLLMConfig


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
