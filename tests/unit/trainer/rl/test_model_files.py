"""Check the keys of transformers 4 in a config.json that transformers 5 wrote."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from trainer.rl import model_files
from trainer.rl.model_files import add_older_keys, with_older_keys

LONGROPE = {"short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_theta": 1e6, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            {"rope_theta": 5e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            {
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                }
            },
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (  # version 4 refuses any other key in Phi3's rope_scaling
            {
                "model_type": "phi3",
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | LONGROPE,
            },
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
        ),
        (
            {
                "model_type": "gpt_neox",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.5,
                },
            },
            {
                "rope_theta": 5e4,
                "partial_rotary_factor": 0.5,
                "rope_scaling": None,
                "rotary_emb_base": 5e4,
                "rotary_pct": 0.5,
            },
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, None),
        ({"rope_parameters": None}, {}),
    ],
)
def test_keys_of_version_4_stand_beside_those_of_version_5(
    config: dict[str, Any], older: dict[str, Any] | None
) -> None:
    expected = {"rope_theta": 1.0, "rope_scaling": None} if older is None else older
    assert with_older_keys(config) == config | expected


def test_nested_configs_get_them_too() -> None:
    inner = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    config = with_older_keys({"tie_word_embeddings": True, "text_config": inner})
    assert config["text_config"]["rope_theta"] == 1e6
    assert config["text_config"]["tie_word_embeddings"] is True  # version 4 has another default
    assert "rope_theta" not in config


def test_layer_types_without_keys_in_version_4_get_none() -> None:
    by_type = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    config = {"model_type": "of_the_future", "rope_parameters": by_type}
    assert with_older_keys(config) == config


def test_a_config_is_read_as_before(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    LlamaConfig(rope_parameters=rope).save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    add_older_keys(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 5e5 and written["rope_scaling"]["factor"] == 8.0
    assert (
        AutoConfig.from_pretrained(tmp_path).to_dict()["rope_parameters"]
        == (before["rope_parameters"])
    )
    add_older_keys(tmp_path)  # a second time, nothing changes
    assert json.loads((tmp_path / "config.json").read_text()) == written


def test_a_config_that_would_be_read_differently_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(
        tmp_path
    )
    text = (tmp_path / "config.json").read_text()
    wrong = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}  # version 5 prefers it
    monkeypatch.setattr(model_files, "with_older_keys", lambda config: config | wrong)
    with caplog.at_level(logging.WARNING):
        add_older_keys(tmp_path)
    assert (tmp_path / "config.json").read_text() == text
    assert "with the keys of version 4 it would read another rope_parameters" in caplog.text


def test_a_folder_of_adapters_has_no_config(tmp_path: Path) -> None:
    add_older_keys(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rotary_positions_without_a_known_older_key_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_type = {
        "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = {"model_type": "modernbert-decoder", "rope_parameters": by_type}
    assert "rope_theta" not in with_older_keys(config)
    assert "modernbert-decoder: transformers 4 has no key" in caplog.text
    caplog.clear()
    with_older_keys({"model_type": "gemma3_text", "rope_parameters": by_type})
    assert not caplog.text
