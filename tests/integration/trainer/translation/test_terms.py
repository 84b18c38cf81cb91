"""Check that a new reward component is one class and one line: trained, logged, shown, compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.kits.trainer.rewards import reward_services
from tests.kits.trainer.runs import byte_level_tokenizer, example, rollout, save_policy
from trainer.__main__ import app
from trainer.runs.stats import Curve, StatSpec
from trainer.translation.config import TranslationConfig
from trainer.translation.evaluation.stats import table
from trainer.translation.rewards.component import TextComponent
from trainer.translation.rewards.components import COMPONENTS, needed, weighted
from trainer.translation.rewards.compute import compute_rewards
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import Scores
from trainer.translation.rollouts import TranslationRollout

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = ("test_a_term_is_in_the_log_the_console_the_report_and_the_comparison",)


class Brevity(TextComponent):
    """A component of minus one for each new character in the text."""

    name = "brevity"
    table = (
        StatSpec(
            key="brevity_mean",
            title="brevity (characters)",
            digits=1,
            better="higher",
            hidden_at=(None,),
            column="brief",
            narrow=True,
            in_console=True,
            value_of_row=lambda line: line.get("brevity"),
        ),
    )
    curves = (Curve(title="brevity", keys=("brevity_mean",), held_out="brevity_mean"),)

    def value(self, rollout: TranslationRollout) -> float:
        return -float(len(set(rollout.completion_text)))


@pytest.fixture
def brevity() -> Iterator[None]:
    COMPONENTS.append(Brevity())
    yield
    COMPONENTS.pop()


def test_the_value_times_the_weight_is_added(brevity: None) -> None:
    sampled = rollout([1], [5, 6], "열기", src_text="Open.", pair="en-US>ko-KR")
    cfg = RewardConfig(w_metricx=0, w_xcomet_span=0, terms={"brevity": 0.25})
    (reward,) = compute_rewards([sampled], Scores(), cfg)
    assert reward.r_seq == -0.5 and reward.values == {"brevity": -2.0}


def test_a_weight_of_no_term_is_a_mistake(brevity: None) -> None:
    for name in ("brevty", "metricx"):  # the second has its own key
        with pytest.raises(UserError, match=f"reward.terms: '{name}' .*brevity"):
            weighted(RewardConfig(terms={name: 1.0}))


@pytest.mark.parametrize("name", ["metricx", "embedder"])  # the first has its own key
def test_urls_of_no_further_service_are_a_mistake(name: str) -> None:
    with pytest.raises(UserError, match=f"reward.urls: '{name}' "):
        needed(RewardConfig(urls={name: "http://127.0.0.1:9"}))


def test_a_term_is_in_the_log_the_console_the_report_and_the_comparison(
    brevity: None, tmp_path: Path
) -> None:
    policies = [
        save_policy(tmp_path / f"policy-{seed}", byte_level_tokenizer(), seed=seed)
        for seed in (1, 2)
    ]
    rows = [example(f"Save {n}.", str(n), "저장") for n in range(12)]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {
                    "id": row.id,
                    "src_text": row.src_text,
                    "src_lang": row.src_lang,
                    "tgt_lang": row.tgt_lang,
                    "src_lang_code": row.src_lang_code,
                    "tgt_lang_code": row.tgt_lang_code,
                    "ref_text": row.ref_text,
                }
            )
            + "\n"
            for row in rows
        )
    )
    with reward_services() as running:
        config = tmp_path / "run.yaml"
        config.write_text(
            json.dumps(
                {
                    "data": {"train": str(data), "eval": str(data)},
                    "policy": {"path": str(policies[0])},
                    "generation": {"prompt_template": "source", "max_new_tokens": 4},
                    "reward": {**running.urls, "w_xcomet_span": 0, "terms": {"brevity": 0.5}},
                    "rl": {"num_updates": 1, "batch_size": 4, "warmup_updates": 0},
                    "misc": {"device": "cpu", "threads": 1, "run_dir": str(tmp_path / "run")},
                }
            )
        )
        trained = CliRunner().invoke(app, ["train", "--config", str(config)])
        assert trained.exit_code == 0, trained.output
        compared = CliRunner().invoke(
            app,
            [
                "evaluate",
                "--config",
                str(config),
                "--against",
                str(policies[1]),
                "--set",
                f"misc.run_dir={tmp_path / 'evaluation'}",
            ],
        )
        assert compared.exit_code == 0, compared.output
    (line,) = [json.loads(text) for text in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    dump = (tmp_path / "run/completions").glob("train-*.jsonl")
    values = [json.loads(text)["brevity"] for path in dump for text in path.open()]
    assert line["brevity_mean"] == pytest.approx(sum(values) / len(values))
    assert "brief" in trained.stderr and "brevity " in trained.stderr  # column, and evaluation
    assert "brevity (characters)" in trained.stdout  # before and after
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "<td>brevity (characters)</td>" in page and ">brevity<" in page
    assert "brevity (characters)" in compared.stdout
    groups = json.loads((tmp_path / "evaluation/comparison.json").read_text())["groups"]
    (row,) = [row for row in groups["all"] if row["key"] == "brevity_mean"]
    for name, mean in (("against/", row["first"]), ("", row["second"])):
        dump = tmp_path / f"evaluation/{name}evaluation.jsonl"
        values = [json.loads(text)["brevity"] for text in dump.open()]
        assert row["sources"] == len(values) == 12 and mean == pytest.approx(sum(values) / 12)


def test_no_two_figures_have_one_key() -> None:
    keys = [stat.key for stat in table()]
    columns = [stat.column for stat in table() if stat.column]
    assert len(set(keys)) == len(keys) and len(set(columns)) == len(columns)


def test_every_term_is_described(brevity: None) -> None:
    cfg = load_config(TranslationConfig, None, ["reward.terms={brevity: 1}"]).reward
    for term in COMPONENTS:
        assert term.name and term.__doc__ and isinstance(term.weight(cfg), float)
