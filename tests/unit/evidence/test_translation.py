"""Check the helpers of the RL evidence: an error must be visible in its stats."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier

import pytest

from evidence.translation.arms import ARMS, ON_OMISSIONS, make_plan
from evidence.translation.control import Dealer, fit_spans, shuffled
from evidence.translation.omissions import OmissionTeller, omissions
from evidence.translation.report import ablation_table, quality_table, reward_table
from evidence.translation.summary import (
    by_fault,
    compute_stats,
    own_change,
    own_reward,
    probe_changes,
)
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import running_service
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import RewardClient


def _line(mt="설정", **other):
    line = {
        "pair": "en-US>ko-KR",
        "mt": mt,
        "ref": "설정하기",
        "metricx_score": 10.0,
        "xcomet_score": 0.5,
        "penalty": -2.0,
        "error_spans": [{"severity": "MAJOR"}],
        "tokens": 3,
        "finish_reason": "eos",
        "guards": {"script": 0.25, "copy": 0.0},
    }
    return line | other


def _lines(*scores):
    return [_line(metricx_score=score) for score in scores]


def test_the_standard_error_is_that_of_the_pairs():
    change = own_change(_lines(9.0, 5.0, 1.0, 7.0), _lines(8.0, 3.0, 0.0, 5.0), ARMS["metricx"])
    assert (change["before"], change["after"], change["change"]) == (-0.5, 1.0, 1.5)
    assert change["standard_error"] == pytest.approx((1 / 3) ** 0.5 / 2)  # of 1, 2, 1, 2
    assert change["errors"] == pytest.approx(1.5 / change["standard_error"])


def test_a_missing_score_leaves_its_pair_out():
    change = own_change(_lines(4.0, None, 4.0, 2.0), _lines(3.0, 0.0, None, 0.0), ARMS["metricx"])
    assert (change["sources"], change["before"], change["after"]) == (2, 2.0, 3.5)


def test_an_arm_is_judged_by_what_it_was_rewarded_for():
    line = _line(metricx_score=8.0, penalty=-2.0)
    rewards = {name: own_reward(line, ARMS[name]) for name in ("metricx", "spans", "both")}
    assert rewards == {"metricx": -3.0, "spans": -2.0, "both": pytest.approx(-3.2)}
    assert own_reward(_line(metricx_score=None), ARMS["metricx"]) is None
    assert own_reward(_line(metricx_score=None), ARMS["spans"]) == -2.0
    assert own_reward(_line(penalty=None), ARMS["both"]) is None
    shuffled, both = ARMS["shuffled"], ARMS["both"]
    assert (shuffled.w_metricx, shuffled.w_span) == (both.w_metricx, both.w_span)


def test_penalised_tokens_are_told_from_the_others():
    start = {
        "hit_n": 2.0,
        "hit_logp": -2.0,
        "hit_p": 1.0,
        "free_n": 4.0,
        "free_logp": -4.0,
        "free_p": 2.0,
    }
    end = start | {"hit_logp": -6.0, "hit_p": 0.4, "free_logp": -4.4}
    stats = probe_changes([start, start], [end, end], ["one source", "another"])
    assert (stats["hit_logp"]["before"], stats["hit_logp"]["after"]) == (-1.0, -3.0)
    assert stats["free_logp"]["after"] == pytest.approx(-1.1)
    assert stats["gap_logp"]["after"] - stats["gap_logp"]["before"] == pytest.approx(-1.9)
    assert stats["gap_logp"]["interval"] == pytest.approx([-1.9, -1.9])
    assert stats["hit_p"]["after"] == pytest.approx(0.2)
    assert (stats["hit_tokens"], stats["free_tokens"]) == (4, 8)


def test_a_mean_counts_only_what_was_scored_and_says_how_much_that_was():
    stats = compute_stats([*_lines(4.0, None), _line(metricx_score=8.0, mt="")])
    assert stats["metricx_score"] == 6.0
    assert stats["coverage"] == pytest.approx(2 / 3)
    assert stats["empty"] == pytest.approx(1 / 3)
    assert (stats["spans"], stats["spans_CRITICAL"], stats["korean"]) == (1.0, 0.0, 0.75)


def test_sources_are_grouped_by_what_was_wrong_at_the_start():
    english = _line(mt="Setup", guards={"script": 1.0, "copy": 0.0})
    first, last = [english, _line(mt="설"), _line(mt="설정하기")], [_line(mt="설정하기")] * 3
    groups = by_fault(first, last)
    assert [group["sources"] for group in groups.values()] == [1, 1, 1]
    assert groups["untranslated"]["chrf"] == [0.0, pytest.approx(100.0)]
    assert groups["short"]["length"] == [0.25, 1.0]
    assert groups["neither"]["chrf"] == pytest.approx([100.0, 100.0])


def test_both_services_give_a_sample_the_reward_of_the_same_other_one():
    pool = [(f"source {k}", f"translation {k}") for k in range(20)]
    dealer = Dealer(pool, seed=1)
    samples = [("source 3", "a"), ("source 3", "b")]
    first = dealer.deal("metricx", samples)
    assert dealer.deal("xcomet", samples) == first
    assert all(src != "source 3" for src, _ in first)
    deals = {tuple(dealer.deal(name, samples)) for _ in range(5) for name in ("xcomet", "metricx")}
    assert len(deals) == 5  # sampled again for each request
    later = [dealer.deal("metricx", [(f"other {k}", "c")]) for k in range(200)]
    assert any(pair in samples for (pair,) in later)  # the pool follows the policy


def test_both_services_get_the_same_draw_if_they_ask_at_the_same_time():
    dealer = Dealer([(f"source {k}", f"translation {k}") for k in range(500)], seed=1)
    requests = [[(f"new {k}", f"sample {j}") for j in range(8)] for k in range(300)]
    both_ask = Barrier(2)

    def deals_of(service):
        deals = []
        for samples in requests:
            both_ask.wait(60)
            deals.append(dealer.deal(service, samples))
        return deals

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            metricx, xcomet = pool.map(deals_of, ("metricx", "xcomet"), timeout=120)
    finally:
        sys.setswitchinterval(interval)
    assert metricx == xcomet


def test_spans_of_another_text_cover_the_same_share_of_this_one():
    span = {"start": 5, "end": 10, "severity": "MAJOR", "confidence": 0.5, "text": "56789"}
    (fitted,) = fit_spans([span], "0123456789", "abcd")
    assert fitted == span | {"start": 2, "end": 4, "text": "cd"}
    assert fit_spans([span | {"start": 9}], "0123456789", "ab") == []
    assert fit_spans([span], "0123456789", "") == []


def test_through_the_control_a_sample_gets_what_the_true_services_say_of_others():
    pool = [(f"source {k}", "an other text of some length") for k in range(3)]
    with (
        running_service(FakeBackend("metricx")) as metricx,
        running_service(FakeBackend("xcomet")) as xcomet,
        shuffled({"metricx": metricx, "xcomet": xcomet}, pool, seed=1) as urls,
    ):
        rewarder = RewardClient(
            RewardConfig(**{f"{name}_urls": [url] for name, url in urls.items()})
        )
        scores = rewarder.score([("mine", "short"), ("mine", "text")])
        rewarder.close()
    of_others = [TranslationSample(src=src, mt=mt) for src, mt in pool]
    dealt = [
        [
            [fake_score(sample, top) for sample in of_others].index(result.score)
            for result in scores.results[name]
        ]
        for name, top in (("metricx", 25.0), ("xcomet", 1.0))
    ]
    assert dealt[0] == dealt[1]  # the same partner sample
    assert all(s.end <= 5 for result in scores.results["xcomet"] for s in result.error_spans)


def test_one_seed_of_every_arm_runs_before_the_others():
    runs = make_plan(False, [], [1, 2, 3]).runs
    assert runs[:4] == (("metricx", 1), ("spans", 1), ("both", 1), ("shuffled", 1))
    assert {seed for name, seed in runs if ARMS[name].ablation} == {1}
    assert len(set(runs)) == len(runs) == 4 * 3 + sum(arm.ablation for arm in ARMS.values())


@pytest.mark.parametrize("quick", [False, True])
def test_the_checkpoints_that_are_measured_are_kept(quick):
    plan = make_plan(quick, [], [1])
    settings = dict(setting.split("=", 1) for setting in plan.settings)
    every, number = (
        int(settings[f"misc.{key}"]) for key in ("save_every_n_updates", "keep_checkpoints")
    )
    saved = list(range(every, plan.updates + 1, every))
    assert {step for part in plan.measured for step in part} <= set(saved[-number:])


def test_the_tables_show_what_was_learned_and_what_was_not():
    def run(errors, seed=1, title="both"):
        own_stats = {
            "before": -1.0,
            "after": -0.5,
            "change": 0.5,
            "standard_error": 0.1,
            "errors": errors,
        }
        point = compute_stats([_line()]) | {"chrf": 11.0 + seed, "bleu": 13.0}
        change = {"before": 11.0, "after": 12.0, "interval": [-0.5, 2.5]}
        return {
            "title": title,
            "seed": seed,
            "own_reward": own_stats,
            "curve": [point],
            "kl": None,
            "changes": {"chrf": change, "bleu": change},
        }

    several = [run(5.0), run(6.0, 2), run(7.0, title="other"), run(4.9, 2, title="other")]
    yes, no = reward_table(several).splitlines()[2:]
    assert yes.endswith("| +5.0 to +6.0 | yes |")
    assert no.endswith("| +4.9 to +7.0 | no |")
    _, both, _ = quality_table(several, compute_stats([_line()])).splitlines()[2:]
    assert both.startswith("| both | 12.00 to 13.00 | 13.00 |")
    assert "| +1.00 [-0.50, +2.50] |" in ablation_table([run(5.0)])


def test_the_stand_in_tells_what_of_the_reference_is_missing():
    src, reference = "Open the red door", "빨간 문을 열기"
    assert omissions(src, reference, reference) == []
    (full_omission,) = omissions(src, "", reference)
    assert (full_omission["text"], full_omission["severity"]) == (src, "CRITICAL")
    (omission,) = omissions(src, "빨간 문을", reference)
    assert (omission["text"], omission["severity"]) == ("door", "MAJOR")
    assert src[omission["start"] : omission["end"]] == omission["text"]
    assert len(omissions(src, "빨간", "빨간 문을 빨간")) == 1  # a character counts once
    assert omissions("", "", reference) == [] and omissions(src, "", "") == []


def test_the_stand_in_answers_as_a_judge_does():
    with running_service(OmissionTeller({"Open it": "열기"})) as url:
        cfg = RewardConfig(w_metricx=0, w_xcomet_span=0, w_omission=1, urls={"judge": url})
        with closing(RewardClient(cfg)) as rewarder:
            pairs = [("Open it", "열기"), ("Open it", ""), ("Unknown", "")]
            scored = rewarder.score([(*pair, "en", "ko") for pair in pairs])
    assert [len(result.omissions) for result in scored.results["mqm"]] == [0, 1, 0]
    assert [result.score for result in scored.results["mqm"]] == [0, 25, 0]


def test_an_arm_with_omissions_pays_for_them_on_one_token():
    line = _line(penalty=-1.0, omission=-10.0, tokens=4)
    assert own_reward(line, ON_OMISSIONS["spans-omissions"]) == -3.5
    assert own_reward(line, ON_OMISSIONS["spans"]) == -1.0
    assert own_reward(line | {"omission": None}, ON_OMISSIONS["spans-omissions"]) is None
    for name, arm in ON_OMISSIONS.items():
        override = f"reward.w_omission={arm.w_omission:g}"
        assert (override in arm.settings) == bool(arm.w_omission), name


def test_the_plan_of_omissions_stands_beside_the_other():
    plan = make_plan(False, [], [1, 2], omissions=True)
    assert [run for run in plan.runs if run[0] == "spans-omissions"] == [
        ("spans-omissions", 1),
        ("spans-omissions", 2),
    ]
    assert plan.omissions and ("spans", 2) in plan.runs
    assert plan.folder != make_plan(False, [], [1]).folder
