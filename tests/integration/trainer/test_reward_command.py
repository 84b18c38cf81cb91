"""Check `python -m trainer reward`: what it prints is the reward of a run, and says no password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from scorekit.config import check_config, save_config
from scorekit.rewards import load_definition
from trainer.__main__ import app
from trainer.roleplay.config import RoleplayConfig
from trainer.search.config import SearchConfig
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.short_form import definition_of

RUNNER = CliRunner()
TRANSLATION = {
    "reward": {
        "metricx_urls": "http://me:secret@one:8001,http://two:8001",
        "metricx_model_name": "google/metricx-24-hybrid-large-v2p6",
        "w_metricx": 0.5,
        "w_xcomet_span": 0.5,
        "guards": {"w_copy": 2.0},
        "no_eos_penalty": 5.0,
    }
}


def printed(folder: Path, data: dict[str, Any], *, expected_code: int = 0) -> str:
    path = folder / "c.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    done = RUNNER.invoke(app, ["reward", "--config", str(path)])
    assert done.exit_code == expected_code, done.output
    return done.output


def test_the_reward_of_a_translation_is_a_definition_to_paste(tmp_path: Path) -> None:
    out = printed(tmp_path, TRANSLATION)
    assert "secret" not in out
    (tmp_path / "reward.yaml").write_text(out, encoding="utf-8")
    definition = load_definition(tmp_path / "reward.yaml")
    assert definition.components["metricx"].service == ("http://one:8001", "http://two:8001")
    cfg = check_config(TranslationConfig, TRANSLATION, "test").reward
    cfg.metricx_urls = ["http://one:8001", "http://two:8001"]
    assert definition == definition_of(cfg)
    weights = {name: part.weight for name, part in definition.components.items()}
    assert weights == {"no_eos": -5.0, "guard_copy": -2.0, "metricx": 0.5}
    assert "#   w_xcomet_span 0.5: times the severity, on each token in a span of xCOMET\n" in out
    assert "#   severity_weights: MINOR -1, MAJOR -5, CRITICAL -10\n" in out


def test_a_run_folder_says_the_reward_of_its_config(tmp_path: Path) -> None:
    expected = printed(tmp_path, TRANSLATION)
    save_config(check_config(TranslationConfig, TRANSLATION, "test"), tmp_path / "config.yaml")
    done = RUNNER.invoke(app, ["reward", str(tmp_path)])
    assert done.exit_code == 0 and done.output == expected
    for words in ([], [str(tmp_path), "--config", "c.yaml"]):
        done = RUNNER.invoke(app, ["reward", *words])
        assert done.exit_code == 2 and "give the folder of a run, or --config FILE" in done.output
    done = RUNNER.invoke(app, ["reward", str(tmp_path / "gone")])
    assert done.exit_code == 2 and "not a run" in done.output


def test_spans_alone_have_no_definition(tmp_path: Path) -> None:
    out = printed(tmp_path, {"reward": {"w_metricx": 0.0, "definition": None}})
    assert all(line.startswith("#") for line in out.splitlines()) and "no definition" in out


def test_a_definition_alone_is_printed_as_it_is(tmp_path: Path) -> None:
    content = {
        "components": {"copy": {"rule": "copy", "weight": -2.0}},
        "gates": {"length": {"rule": "length", "reward": -20.0}},
    }
    alone = {"w_metricx": 0.0, "w_xcomet_span": 0.0, "definition": content}
    out = printed(tmp_path, {"reward": alone})
    assert yaml.safe_load(out) == content and "w_definition" not in out
    out = printed(tmp_path, {"reward": alone | {"guards": {"w_copy": 1.0}}})
    assert "#   w_definition 1: times the reward of reward.definition\n" in out


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({}, "reward.metricx_urls: not set, nor METRICX_URL in the environment"),
        ({"metricx_urls": "a.b:C"}, "reward.metricx_urls: a.b:C: a definition has services"),
        ({"w_judge": 1.0, "metricx_urls": "http://a"}, "reward.urls.judge: not set, nor JUDGE_URL"),
    ],
)
def test_a_part_without_a_service_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: dict[str, Any], problem: str
) -> None:
    for name in ("METRICX_URL", "JUDGE_URL"):
        monkeypatch.delenv(name, raising=False)
    out = printed(tmp_path, {"reward": reward}, expected_code=2)
    assert out.startswith(f"error: {problem}") and out.count("\n") == 1


def test_the_section_of_another_task_can_be_pasted_into_its_config(tmp_path: Path) -> None:
    for config, section in (
        (RoleplayConfig, {"weights": {"reward_format": 0.5}, "embedding_model": "http://a:b@c"}),
        (SearchConfig, {"preset": "phase2", "w_ndcg": 0.5}),
    ):
        task = config.model_fields["task"].default
        out = printed(tmp_path, {"task": task, "reward": section})
        pasted = check_config(config, yaml.safe_load(out), "printed")
        section |= {"embedding_model": "http://c"} if task == "roleplay" else {}
        expected = check_config(config, {"reward": section}, "expected").reward
        section_values = pasted.reward.model_dump()
        if task == "roleplay":
            assert (
                len(section_values["weights"]) == 5
                and section_values["weights"]["reward_format"] == 0.5
            )
            section_values["weights"] = expected.weights
        assert section_values == expected.model_dump()


def test_supervised_training_has_no_reward(tmp_path: Path) -> None:
    out = printed(tmp_path, {"task": "sft"}, expected_code=2)
    assert out == "error: task: sft: it learns from given answers, and has no reward\n"
