"""Check the evidence on a clean role-play policy: its judge, its tables, its sentences."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from bench.common import RESULTS, write_json
from demo.common import MODELS
from demo.train.chat_policy import STOP, save
from demo.train.common import setup
from demo.train.data import read_jsonl
from evidence.roleplay.clean import (
    BEGIN,
    END,
    GRPO,
    PAGE,
    QUICK,
    SFT,
    SHUFFLED,
    START,
    STATS,
    TURNS,
    Size,
    caveats,
    changes_of,
    is_done,
    is_new,
    read_results,
    tables,
    verdicts,
    write_dialogues,
)
from evidence.roleplay.judge import ReplyJudge, check_judge, new_judge, train_judge
from scorekit.errors import UserError


def run(arm, seed, judge, reward=0.8):
    """Return a result whose two turns have these values."""
    stats = {"judge": [judge - 0.1, judge + 0.1], "is_new": [1, 1], "reward": [reward, reward]}
    stats["chrf"] = [20.0, 30.0]
    return {"arm": arm, "seed": seed, "stats": stats, "processor_seconds": 36.0, "commit": "c"}


def runs_of(**arms):
    """Return the results of arms by the judge's mean of each seed; the start has -1."""
    lines = [run(START, 0, -1.0)]
    for name, values in arms.items():
        lines += [run(name, seed, value) for seed, value in enumerate(values, 1)]
    return lines


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Return a judge of random weights, with the tokenizer of the demo's policy."""
    from transformers import AutoTokenizer

    setup(1)
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "roleplay_policy")
    save(new_judge(len(tokenizer)), tokenizer, folder)
    return ReplyJudge(folder)


def test_a_reply_has_the_mean_log_probability_of_its_tokens_and_its_end(judge):
    turns = read_jsonl(TURNS["final_test"])[:3]
    prompts, replies = [turn["prompt"] for turn in turns], ["네.", turns[1]["reference"], ""]
    scores = judge.score(prompts, replies)
    for prompt, reply, score in zip(prompts, replies, scores, strict=True):
        text = judge.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=False
        )
        start = judge.tokenizer.encode(text, add_special_tokens=False)
        ids = [*start, *judge.tokenizer.encode(reply, add_special_tokens=False), STOP]
        logits = judge.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs = [logits[i - 1, ids[i]].item() for i in range(len(start), len(ids))]
        assert score == pytest.approx(math.fsum(logprobs) / len(logprobs), abs=1e-4)


def test_the_check_of_a_judge_counts_only_replies_that_differ(judge):
    accuracies = check_judge(judge, 6)
    assert set(accuracies) == {"noisy", "level", "other"}
    assert all(0 <= value <= 1 for value in accuracies.values())

    class Oracle(ReplyJudge):
        def __init__(self):
            self.seen = []

        def score(self, prompts, replies):
            self.seen = self.seen or list(replies)
            return [float(reply == right) for reply, right in zip(replies, self.seen, strict=True)]

    assert set(check_judge(Oracle(), 20).values()) == {1.0}


def test_the_dialogues_of_sft_are_clean_and_in_no_measured_scenario(tmp_path):
    write_dialogues(tmp_path / "a.jsonl", 50)
    rows = read_jsonl(tmp_path / "a.jsonl")
    assert len(rows) == 50
    replies = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    for reply in replies:
        narration, quote = reply.split("\n")
        assert narration and quote.startswith('"') and quote.endswith('"')
    systems = {row["messages"][0]["content"].split("의 ")[0] for row in rows}
    for name in TURNS:
        measured = {row["prompt"][0]["content"].split("의 ")[0] for row in read_jsonl(TURNS[name])}
        assert not systems & measured


def test_a_reply_that_differs_in_names_only_is_not_new():
    turns = [{"character_name": "가원", "player_name": name} for name in ("재윤", "수인", "수인")]
    replies = ["가원은  재윤을 보았다.", "가원은 수인을 보았다.", "가원은 웃었다."]
    assert is_new(turns, replies) == [1, 0, 1]


def test_the_judge_learns_no_dialogue_that_measures(tmp_path, monkeypatch, judge):
    seen = []

    def fit(parameters, loss, steps, rate, name):
        loss(0)

    def template(messages, **options):
        seen.append(messages[0]["content"])
        return [1, 2]

    monkeypatch.setattr("evidence.roleplay.judge.fit", fit)
    monkeypatch.setattr(judge.tokenizer, "apply_chat_template", template)
    train_judge(judge.tokenizer, tmp_path / "a", 1)
    first, *later = seen
    seen.clear()
    train_judge(judge.tokenizer, tmp_path / "b", 1, {first})
    assert first not in seen and seen[: len(later)] == later


def test_a_check_without_a_worse_reply_is_no_accuracy(judge, monkeypatch):
    monkeypatch.setattr("evidence.roleplay.judge.noisy", lambda reply, rng: reply.text)
    assert set(check_judge(judge, 3)) == {"level", "other"}


def test_a_result_of_another_start_is_refused_and_one_of_another_size_is_run_again(tmp_path):
    path = tmp_path / "grpo-1.json"
    assert not is_done(path, "a", QUICK)
    write_json(path, run(GRPO, 1, -1.0) | {"start": "a", "size": asdict(QUICK)})
    assert is_done(path, "a", QUICK) and not is_done(path, "a", Size())
    with pytest.raises(UserError, match=r"another start or judge\. Move"):
        is_done(path, "b", QUICK)


def test_a_start_that_was_stopped_early_and_the_compute_of_sft_are_told():
    curve = [{"chrf": 20.0}, {"chrf": 21.0}]
    flat = [*curve, {"chrf": 21.1}]
    runs = runs_of(grpo=[-0.8])
    assert "a gain over it is no gain" in caveats(runs, curve)[0] and not caveats(runs, flat)
    runs += [run(SFT, 1, -1.0) | {"processor_seconds": 18.0}]
    assert caveats(runs, flat) == ["Continued SFT took 0.50 times the processor seconds of GRPO."]


def test_a_change_is_taken_from_the_frozen_start():
    changes = changes_of(runs_of(grpo=[-0.8, -0.9]), lambda stats: sum(stats["judge"]) / 2)
    assert changes == {GRPO: {1: pytest.approx(0.2), 2: pytest.approx(0.1)}}


def test_the_sentences_say_above_below_or_not_told_apart():
    lines = runs_of(
        grpo=[-0.80, -0.82, -0.81], sft=[-0.99, -1.02, -1.01], shuffled=[-1.5, -0.2, -0.9]
    )
    text = verdicts(lines)[0]
    assert "above the start (+0.190" in text and "above continued SFT (+0.197" in text
    assert "not told apart from the control" in text
    worse = runs_of(grpo=[-1.2, -1.21, -1.22], sft=[-1.0, -1.01, -1.02])
    assert "below the start" in verdicts(worse)[0] and "below continued SFT" in verdicts(worse)[0]
    assert "the control" not in verdicts(worse)[0]


def test_two_seeds_of_grpo_claim_nothing():
    assert verdicts(runs_of(grpo=[1.0, 1.1])) == ["GRPO has fewer than 3 seeds: nothing is shown."]


def test_the_tables_have_every_arm_and_the_checks_of_the_judge():
    start = {
        "curve": [{"stage": "round1", "chrf": 31.0, "reward": 0.9}],
        "chosen": "round1",
        "judge": {"accuracies": {"noisy": 0.97}, "grammar": {"judge": -0.5, "is_new": 1.0}},
    }
    runs = runs_of(grpo=[-0.8] * 3, sft=[-1.0] * 3, shuffled=[-1.1] * 3)
    text = tables({"start": start, "runs": runs})
    assert "97 % (noisy)" in text and "answered 10" in " ".join(text.split())
    assert "-0.500 nats a token, 1.000 distinct" in " ".join(text.split())
    assert text.count("| GRPO, all five | +") == len(STATS) and text.count(
        "| continued SFT |"
    ) == len(STATS)
    assert {SFT, SHUFFLED} <= set(changes_of(runs, lambda stats: stats["judge"][0]))


def test_without_a_result_there_is_no_page(tmp_path):
    with pytest.raises(UserError, match="no result yet"):
        read_results(tmp_path)


def test_the_page_has_the_tables_of_the_results():
    page, folder = PAGE.read_text(encoding="utf-8"), RESULTS / "roleplay_clean"
    if not folder.is_dir():
        assert BEGIN not in page
        return
    assert (
        page.partition(BEGIN)[2].partition(END)[0].strip() == tables(read_results(folder)).strip()
    )
