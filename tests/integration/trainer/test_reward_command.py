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
        "xcomet_urls": "http://three:8002",
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
    assert definition.token_rewards is not None
    assert definition.token_rewards.spans == {"xcomet": 0.5}
    assert definition == definition_of(cfg)
    weights = {name: part.weight for name, part in definition.components.items()}
    assert weights == {"no_eos": -5.0, "guard_copy": -2.0, "metricx": 0.5, "xcomet": 0.0}


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


def test_spans_alone_are_a_definition(tmp_path: Path) -> None:
    urls = {"xcomet_urls": "http://three:8002"}
    out = printed(tmp_path, {"reward": {"w_metricx": 0.0, "w_mqm_span": 0.0} | urls})
    definition = load_definition(yaml.safe_load(out))
    assert definition.required == {"xcomet"} and definition.token_rewards is not None
    assert definition.token_rewards.spans == {"xcomet": 1.0}
    nothing = {"w_metricx": 0.0, "w_xcomet_span": 0.0}
    out = printed(tmp_path, {"reward": nothing})
    assert all(line.startswith("#") for line in out.splitlines())


def test_a_definition_is_printed_with_the_parts_beside_it(tmp_path: Path) -> None:
    content = {
        "components": {"copy": {"rule": "copy", "weight": -2.0}},
        "gates": {"length": {"rule": "length", "reward": -20.0}},
    }
    alone = {"w_metricx": 0.0, "w_xcomet_span": 0.0, "definition": content}
    out = printed(tmp_path, {"reward": alone})
    refused = {"invalid_input": -20.0, "overlong": -20.0}  # text_error_reward
    assert yaml.safe_load(out) == content | {"refused_text_reward": refused}
    half = printed(tmp_path, {"reward": alone | {"w_definition": 0.5}})
    definition = load_definition(yaml.safe_load(half))
    assert definition.components["copy"].weight == -1.0
    assert definition.gates["length"].reward == -10.0
    with_guard = alone | {"guards": {"w_copy": 1.0}}
    out = printed(tmp_path, {"reward": with_guard}, expected_code=2)
    assert out.startswith("error: reward.definition.gates.length: it lowers a reward, and")
    without = {"components": content["components"], "refused_text_reward": {"overlong": -3.0}}
    out = printed(tmp_path, {"reward": with_guard | {"definition": without}})
    assert "#   w_definition 1: times the reward of reward.definition, whose refused_text_" in out
    del without["refused_text_reward"]
    out = printed(
        tmp_path, {"reward": with_guard | {"definition": without, "terms": {"copy": -4.0}}}
    )
    weights = {n: p["weight"] for n, p in yaml.safe_load(out)["components"].items()}
    assert weights == {"guard_copy": -1.0, "copy": -4.0}


class Scorer:
    """A scorer of this process that takes the name of its model."""

    def __init__(self, metricx_model_name: str, factor: float = 1.0) -> None:
        self.model, self.factor = metricx_model_name, factor

    def score_batch(self, samples: Any, cfg: Any = None) -> Any:
        """Do nothing."""


def test_a_class_of_this_process_is_printed_with_its_arguments(tmp_path: Path) -> None:
    reward = {
        "metricx_urls": f"{__name__}:Scorer",
        "metricx_scorer_args": {"factor": 2.0},
        "metricx_model_name": "google/metricx",
        "w_xcomet_span": 0.0,
    }
    part = yaml.safe_load(printed(tmp_path, {"reward": reward}))["components"]["metricx"]
    assert part["scorer"] == f"{__name__}:Scorer" and "model" not in part
    assert part["arguments"] == {"metricx_model_name": "google/metricx", "factor": 2.0}
    keys = {"metricx_urls": "http://a", "metricx_tokenizer_name": "t", "w_xcomet_span": 0.0}
    out = printed(tmp_path, {"reward": keys})
    assert yaml.safe_load(out)["components"]["metricx"]["tokenizer"] == "t"


def test_an_old_name_in_terms_is_told_to_go_to_the_definition(tmp_path: Path) -> None:
    out = printed(tmp_path, {"reward": {"terms": {"brevity": 0.1}}}, expected_code=2)
    assert out.startswith("error: reward.terms: 'brevity' is no component of reward.definition.")
    assert out.count("\n") == 1 and "a function and a line of YAML: docs/how-to/add-a-reward" in out


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({}, "reward.metricx_urls: not set, nor METRICX_URL in the environment"),
        ({"metricx_urls": "a.b:C"}, "reward.metricx_urls, reward.metricx_scorer_args: scorer 'a."),
        ({"metricx_urls": "http://a"}, "reward.xcomet_urls: not set, nor XCOMET_URL in the env"),
        ({"w_judge": 1.0, "w_metricx": 0, "w_xcomet_span": 0}, "reward.urls.judge: not set, nor"),
    ],
)
def test_a_part_without_a_service_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: dict[str, Any], problem: str
) -> None:
    for name in ("METRICX_URL", "XCOMET_URL", "JUDGE_URL"):
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
