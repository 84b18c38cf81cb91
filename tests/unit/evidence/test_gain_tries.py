"""Check the tries of other rewards: the log-probability reward, the labels, and the table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.common import RESULTS, ROOT
from demo.train.common import sentence_chrf, setup
from demo.train.examples import Labeller
from demo.train.policy import lm_loss, load, pair_ids
from evidence.gain import tries
from evidence.gain.arms import PPO_CONFIG, make_plan, overrides
from evidence.gain.log_probability import SCALE, LogProbability, mean_logprobs
from evidence.gain.runs import start_digest
from evidence.gain.tries import BEGIN, END, PAGE, SCORER, TRIES, chrf_beta_1, run_tries, table
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.scorers import SampleForScoring
from trainer.translation.config import TranslationConfig

POLICY = ROOT / "demo/models/policy"
PAIRS = [("Open the file", "파일을 엽니다"), ("Save", "저장"), ("Close", "")]


@pytest.fixture(scope="module")
def policy():
    setup(1)
    return load(POLICY)


def test_a_mean_log_probability_is_the_loss_of_the_target_and_its_end(policy):
    model, tokenizer = policy
    losses = [lm_loss(model, [pair_ids(tokenizer, *pair)]).item() for pair in PAIRS]
    assert mean_logprobs(model, tokenizer, PAIRS) == pytest.approx([-x for x in losses], abs=1e-4)


def test_a_reward_without_a_metric_reads_both_directions(policy):
    forward, backward = (
        mean_logprobs(*policy, PAIRS),
        mean_logprobs(*policy, [p[::-1] for p in PAIRS]),
    )
    samples = [SampleForScoring(src=src, mt=mt) for src, mt in PAIRS]
    output = LogProbability(str(POLICY), str(POLICY)).score_batch(samples)
    expected = [-SCALE * (a + b) for a, b in zip(forward, backward, strict=True)]
    assert output.sequence_scores == pytest.approx(expected, abs=1e-4)
    assert [result.score for result in output.metadata] == output.sequence_scores


def test_length_cannot_please_chrf_with_beta_1(policy):
    reference, longer = "저장합니다", "저장합니다 저장합니다 파일"
    assert sentence_chrf(longer, reference) - chrf_beta_1(longer, reference) > 5
    assert chrf_beta_1(reference, reference) == 100
    labeller = Labeller(policy[1], quality=chrf_beta_1)
    label = labeller.sample("Save", longer, reference).score
    assert label == pytest.approx(25 * (1 - chrf_beta_1(longer, reference) / 100))
    assert Labeller(policy[1]).sample("Save", longer, reference).score < label


@pytest.mark.parametrize("name", TRIES)
def test_each_try_is_a_config_that_differs_from_the_arm(name):
    plan = make_plan(development=True, size=TRIES[name].size)
    settings = [*overrides("ppo", 1, plan, POLICY), *TRIES[name].settings]
    cfg = load_config(TranslationConfig, PPO_CONFIG, settings)
    assert cfg.rl.num_updates == (156 if name == "many" else 26)
    assert (cfg.reward.w_xcomet_span == 0) == (name in ("no-spans", "log-probability"))
    assert (cfg.reward.metricx_urls == [SCORER]) == (name == "log-probability")
    assert plan.sets == ("development",)


def test_without_a_start_or_with_results_of_another_one_nothing_is_run(tmp_path, monkeypatch):
    path, start = tmp_path / "tries.json", tmp_path / "start"
    plan = replace(make_plan(development=True), folder=tmp_path / "runs", start=start)
    monkeypatch.setattr(tries, "make_plan", lambda **options: plan)
    monkeypatch.setattr(tries, "REVERSE", tmp_path / "reverse")
    with pytest.raises(UserError, match=r"start/policy: no start\. Make it: python -m"):
        run_tries(["base"], path)
    (start / "policy").mkdir(parents=True)
    with pytest.raises(UserError, match=r"reverse: no start.*--direction ko-en"):
        run_tries(["log-probability"], path)
    recorded = {"start": "another", "tries": {"start": {}, "base": {}}}
    path.write_text(json.dumps(recorded), encoding="utf-8")
    with pytest.raises(UserError, match="of another start"):
        run_tries(["base"], path)
    assert json.loads(path.read_text(encoding="utf-8")) == recorded
    path.write_text(json.dumps(recorded | {"start": start_digest(start)}), encoding="utf-8")
    run_tries(["base"], path)  # all is there


def test_the_table_has_changes_from_the_start():
    start = {"greedy": 20.0, "sampled": 18.0, "bleu": 19.0, "length": 0.9, "reward": -2.0}
    start |= {"sources": 320, "processor_seconds": 0}
    line = start | {"greedy": 20.5, "length": 0.95, "processor_seconds": 72}
    text = table({"tries": {"start": start, "base": line}, "commit": "c"})
    assert "| PPO as in the table | +0.50 | +0.00 | +0.00 | +0.050 | +0.000 | 72 |" in text
    assert "0.02 core-hours" in text and "320 sources" in text


def test_the_page_has_the_table_of_the_results():
    page, path = PAGE.read_text(encoding="utf-8"), RESULTS / "gain/tries.json"
    if not path.is_file():
        assert BEGIN not in page
        return
    expected = table(json.loads(path.read_text(encoding="utf-8")))
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == expected.strip()
