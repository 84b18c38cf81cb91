"""Check that a component of a definition is trained, logged, shown and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from tests.kits.trainer.rewards import reward_services
from tests.kits.trainer.runs import byte_level_tokenizer, example, rollout, save_policy
from trainer.__main__ import app
from trainer.translation.evaluation.stats import table
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import Scores
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.screening import check_references
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import needed_services, weighted_parts

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = ("test_a_component_is_in_the_log_the_console_the_report_and_the_comparison",)
FUNCTION = """
def brevity(sample):
    return -float(len(set(sample["mt"])))
"""


@pytest.fixture
def definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return a definition with a function of the user's."""
    (tmp_path / "short_texts.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"components": {"brevity": {"rule": "short_texts:brevity", "weight": 0.25}}}


def test_the_value_times_the_weight_is_added(definition: dict[str, object]) -> None:
    sampled = rollout([1], [5, 6], "열기", src_text="Open.", pair="en-US>ko-KR")
    none = {"w_metricx": 0, "w_xcomet_span": 0, "definition": definition}
    for keys, expected in (({}, -0.5), ({"terms": {"brevity": 2.0}, "w_definition": 0.5}, -2.0)):
        cfg = RewardConfig(**none, **keys)
        client = RewardClient(cfg)
        scores = client.score([sampled.scored_text])
        client.close()
        (reward,) = compute_rewards([sampled], scores, cfg)
        assert reward.r_seq == expected


def test_a_weight_of_no_component_is_a_mistake(definition: dict[str, object]) -> None:
    for name in ("brevty", "metricx"):  # the second has its own key
        for keys in ({}, {"definition": definition}):
            cfg = RewardConfig(terms={name: 1.0}, **keys)
            with pytest.raises(UserError, match=f"reward.terms: '{name}' is no component"):
                weighted_parts(cfg)


@pytest.mark.parametrize("name", ["metricx", "embedder"])  # the first has its own key
def test_urls_of_no_further_service_are_a_mistake(name: str) -> None:
    with pytest.raises(UserError, match=f"reward.urls: '{name}' "):
        needed_services(RewardConfig(urls={name: "http://127.0.0.1:9"}))


def test_a_row_without_a_reference_that_the_reward_needs_is_named() -> None:
    cfg = RewardConfig(w_metricx=0, w_xcomet_span=0, w_chrf=1.0)
    with pytest.raises(UserError, match=r"data.train: 1 of 1 rows have no ref_text \(e\), which"):
        check_references([example("Open.")], cfg, "data.train")
    with pytest.raises(UserError, match=r"^e: reward\.chrf: chrf gives no value"):
        compute_rewards([rollout([1], [5], "열기")], Scores(), cfg)


def test_a_component_is_in_the_log_the_console_the_report_and_the_comparison(
    definition: dict[str, object], tmp_path: Path
) -> None:
    policies = [
        save_policy(tmp_path / f"policy-{seed}", byte_level_tokenizer(), seed=seed)
        for seed in (1, 2)
    ]
    rows = [example(f"Save {n}.", str(n), "저장") for n in range(12)]
    data = tmp_path / "data.jsonl"
    keys = ["id", "src_text", "src_lang", "tgt_lang", "src_lang_code", "tgt_lang_code", "ref_text"]
    lines = [json.dumps({key: getattr(row, key) for key in keys}) + "\n" for row in rows]
    data.write_text("".join(lines))
    with reward_services() as running:
        config = tmp_path / "run.yaml"
        config.write_text(
            json.dumps(
                {
                    "data": {"train": str(data), "eval": str(data)},
                    "policy": {"path": str(policies[0])},
                    "generation": {"prompt_template": "source", "max_new_tokens": 4},
                    "reward": {**running.urls, "w_xcomet_span": 0, "definition": definition},
                    "rl": {"num_updates": 1, "batch_size": 4, "warmup_updates": 0},
                    "misc": {"device": "cpu", "threads": 1, "run_dir": str(tmp_path / "run")},
                }
            )
        )
        trained = CliRunner().invoke(app, ["train", "--config", str(config)])
        assert trained.exit_code == 0, trained.output
        folder = f"misc.run_dir={tmp_path / 'evaluation'}"
        against = ["--against", str(policies[1]), "--set", folder]
        compared = CliRunner().invoke(app, ["evaluate", "--config", str(config), *against])
        assert compared.exit_code == 0, compared.output
    (line,) = [json.loads(text) for text in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    dump = (tmp_path / "run/completions").glob("train-*.jsonl")
    dumped = [json.loads(text) for path in dump for text in path.open()]
    values = [stats["component/brevity"] for row in dumped if (stats := row["definition_stats"])]
    assert line["definition_component_brevity_mean"] == pytest.approx(sum(values) / len(values))
    assert "comp" in trained.stderr  # a column
    assert "composite reward" in trained.stdout and "composite reward" in compared.stdout
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "<td>composite reward</td>" in page
    groups = json.loads((tmp_path / "evaluation/comparison.json").read_text())["groups"]
    (row,) = [row for row in groups["all"] if row["key"] == "definition_score_mean"]
    for name, mean in (("against/", row["first"]), ("", row["second"])):
        dump = tmp_path / f"evaluation/{name}evaluation.jsonl"
        values = [json.loads(text)["definition_score"] for text in dump.open()]
        assert row["sources"] == len(values) == 12 and mean == pytest.approx(sum(values) / 12)


def test_no_two_figures_have_one_key() -> None:
    keys = [stat.key for stat in table()]
    columns = [stat.column for stat in table() if stat.column]
    assert len(set(keys)) == len(keys) and len(set(columns)) == len(columns)
