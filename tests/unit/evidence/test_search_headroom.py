"""Check the headroom of search: what its table and its sentence are made of."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from demo.search.searching import complete_tag
from evidence.search.headroom import TITLES, in_words, script_policy, summarise, table
from trainer.search.rollout.episode import TurnRequest
from trainer.search.rollout.prompt import Message


def line(question: str, right: float, small: bool = False) -> dict:
    return {
        "question": question,
        "type": "small print" if small else "figure",
        "success_share": right,
        "gold_seen_share": right,
        "ndcg_mean": right / 2,
        "turns_mean": 3.0,
        "forced_share": 0.0,
    }


def write(path, lines):
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


@pytest.fixture
def results(tmp_path):
    for name in TITLES:
        if name not in ("samples", "best"):
            rights = [1.0, 1.0] if name == "oracle" else [1.0, 0.0]
            write(
                tmp_path / f"{name}.jsonl", [line("a", rights[0]), line("b", rights[1], small=True)]
            )
    rights = {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0]}
    samples = [line(q, right, small=q == "b") for q, values in rights.items() for right in values]
    write(tmp_path / "samples.jsonl", samples)
    return {"samples": 4, "players": summarise(tmp_path)}


def test_samples_count_by_their_mean_and_by_their_best(results):
    means = [row["success_share"] for row in results["players"]["samples"].values()]
    bests = [row["success_share"] for row in results["players"]["best"].values()]
    assert means == [0.5, 0.25] and bests == [1.0, 1.0]


def test_the_table_has_a_row_for_each_player_and_small_print_apart(results):
    rows = {row.split(" | ")[0].strip("| "): row for row in table(results).splitlines()}
    assert set(TITLES.values()) <= rows.keys()
    assert rows[TITLES["greedy"]].split(" | ")[1].startswith("0.500 [")
    assert rows[TITLES["greedy"]].split(" | ")[2] == "0.000"


def test_an_answer_that_was_not_judged_lowers_the_coverage_and_is_not_wrong(tmp_path, results):
    write(tmp_path / "rules.jsonl", [line("a", 1.0), line("b", 0.0) | {"success_share": None}])
    players = summarise(tmp_path)
    assert [row["success_share"] for row in players["rules"].values()] == [1.0, None]
    rows = {
        row.split(" | ")[0].strip("| "): row for row in table({"players": players}).splitlines()
    }
    rules = rows[TITLES["rules"]]
    assert rules.split(" | ")[1].startswith("1.000 [") and rules.endswith("| 0.500 |")
    for values in players["rules"].values():
        del values["coverage"]  # as in results of before it was noted
    assert table({"players": players}).splitlines()[5].endswith("| – |")


def test_the_sentence_says_the_numbers_of_the_table(results):
    text = in_words(results)
    assert "Of 2 questions the oracle gets 1.00 right, and the start 0.50." in text
    assert "right in 0.38, one of 4 samples in 1.00" in text


def test_a_script_draws_the_same_again_for_the_same_turn():
    numbers = []

    def script(messages, question, rng: random.Random) -> str:
        numbers.append(rng.random())
        return complete_tag()

    messages = [Message("system", "Search."), Message("user", "Question: Who?")]
    requests = [TurnRequest(name, 1, messages, None, 100) for name in ("x", "x", "y")]
    policy = script_policy(script)
    texts = [asyncio.run(policy.turn(request)).text for request in requests]
    assert numbers[0] == numbers[1] != numbers[2]
    assert set(texts) == {f"<think>-</think>\n{complete_tag()}"}
