"""Check the control of the role-play evidence and the page of its results."""

from __future__ import annotations

import json

from bench.common import RESULTS
from evidence.roleplay.arms import ARMS, order
from evidence.roleplay.control import dealt, shuffled
from evidence.roleplay.report import BEGIN, END, PAGE, tables
from trainer.roleplay.rewards import REWARDS


def test_every_reply_gets_the_values_of_one_to_another_prompt():
    prompts = [f"prompt {k // 4}" for k in range(16)]
    deal = dealt(prompts, 1)
    assert all(prompts[deal[k]] != prompts[k] for k in range(16))
    assert deal == dealt(prompts, 1) != dealt(prompts, 2)


def test_all_functions_deal_alike_and_keep_their_names():
    def first(prompts, completions, **columns):
        return [float(text) for text in completions]

    def second(prompts, completions, **columns):
        return [10 * float(text) for text in completions]

    prompts, completions = [f"p{k // 2}" for k in range(8)], [str(k) for k in range(8)]
    values = [shuffled(function, 3)(prompts, completions) for function in (first, second)]
    assert values[1] == [10 * value for value in values[0]] and values[0] != list(range(8))
    assert shuffled(first, 3).__name__ == "first"


def test_each_function_is_left_out_once():
    assert [arm.left_out for arm in ARMS.values() if arm.left_out] == [r.name for r in REWARDS]
    assert order([], [1, 2])[: len(ARMS)] == [(name, 1) for name in ARMS]


def test_the_page_holds_what_the_results_say():
    results = json.loads((RESULTS / "roleplay_evidence.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert tables(results) in page.partition(BEGIN)[2].partition(END)[0]
