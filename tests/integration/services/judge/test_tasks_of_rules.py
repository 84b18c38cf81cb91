"""Check which tasks the judge's rules answer."""

from __future__ import annotations

from testing.judge import ANSWER, GOOD, judge, running_judge


def test_rules_answer_those_tasks_that_have_a_rule():
    grounded = {"task": "answer_grounded", "query": "q", "answer": "a", "id": "b"}
    with running_judge() as url:
        good, right, wrong, other = judge(
            url,
            GOOD | {"id": "a"},
            ANSWER | {"reference": "in 1889"},
            ANSWER | {"reference": "in 1890"},
            grounded,
        )
        (named,) = judge(url, GOOD, model="gpt")
    assert good["ok"] and good["id"] == "a"
    assert (right["score"], right["verdict"]["reason_code"]) == (1.0, "correct")
    assert (wrong["score"], wrong["verdict"]["reason_code"]) == (0.0, "wrong")
    assert "rules read no meaning" in wrong["verdict"]["notes"]
    assert other["error"]["type"] == "invalid_input" and other["id"] == "b"
    assert "--backend openai" in other["error"]["message"]
    assert named["error"]["type"] == "invalid_input"
