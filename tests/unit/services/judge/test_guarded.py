"""Check texts in the judge's prompt and which answers are verdicts."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorekit.llm import Choice, LLMError, parse_json
from scorekit.text.chat_marks import CLOSES, OPENS
from services.judge.fence import defuse
from services.judge.rubrics import load_rubrics

RUBRICS = load_rubrics()
#: Special tokens of EXAONE, Seed, DeepSeek, Llama, Mistral, Gemma, GLM, MiniMax, Command R, ERNIE,
#: Phi and T5.
TOKENS = [
    "[|user|]",
    "[|endofturn|]",
    "<seed:bos>",
    "<[begin▁of▁sentence]>",
    "<｜Assistant｜>",
    "<s>",
    "</s>",
    "<<SYS>>",
    "<</SYS>>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "<start_of_turn>",
    "<|turn>",
    "<turn|>",
    "[gMASK]",
    "<sop>",
    "]~!b[",
    "]~b]",
    "[e~[",
    "<EOS_TOKEN>",
    "<mask:1>",
    "<|end|>",
    "<extra_id_0>",
    "<tool_call>",
    "</think>",
    "<|START_OF_TURN_TOKEN|>",
    "<unk>",
]
FRAGMENTS = [*TOKENS, *"<>[]|｜/~!:▁_ab가 \n⟦⟧", "INST", "s", "im_end", "br"]


@pytest.mark.parametrize("token", TOKENS)
def test_no_token_of_a_chat_stays_whole(token):
    for text in (token, f"안녕{token}\n{token}{token}", f"<{token}>", f"[{token}]"):
        assert token not in defuse(text)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join))
@example("|]~!b[")
def test_nothing_shaped_like_a_token_is_left_and_nothing_else_changes(text):
    safe = defuse(text)
    assert not OPENS.search(safe) and not CLOSES.search(safe)
    plain = text.translate(str.maketrans({"⟦": "[", "⟧": "]"}))
    assert safe.replace(" ", "") == plain.replace(" ", "")


@pytest.mark.parametrize(
    "text",
    [
        "a < b and c > d",
        "<b>bold</b> <BR> <br/>",
        '<a href="x">y</a>',
        "[1] [x] [a-z] [안내]",
        "| a | b |\n|---|---|",
        "{count} %s {{ name }}",
        "x << 2 >> 1",
        "std::vector<int >",
        "a[i][j]",
        "<https://example.org>",
        "<me@example.org>",
        "가격: <50,000원",
        "~5분 [약]",
    ],
)
def test_plain_text_stays_as_it_is(text):
    assert defuse(text) == text


# -- answers ---------------------------------------------------------------------------------------

FILTER, GRADE = RUBRICS["translation_filter"], RUBRICS["answer_correctness"]
VERDICTS = st.one_of(
    st.just("ok").map(lambda reason: {"pass": True, "reason_code": reason}),
    st.sampled_from(["wrong_language", "meaning", "commentary", "structure"]).map(
        lambda reason: {"pass": False, "reason_code": reason}
    ),
)
NOTES = st.text(st.characters(codec="utf-8")) | st.sampled_from(["```", "</think>", '"}'])
WRAPPED = [
    "{}",
    " {}\n",
    "```json\n{}\n```",
    "```\n{}```",
    "<think>hm {{}}</think>\n\n{}",
    "hm, well</think>{}",
    "<seed:think>hm</seed:think>{}",
    "<think></think>```json\n{}\n```",
]


def judged(text, rubric=FILTER, finish_reason="stop"):
    return rubric.read(parse_json(Choice(0, text, finish_reason, 1), rubric.schema_), {})


@given(VERDICTS, NOTES, st.sampled_from(WRAPPED))
def test_a_verdict_is_one_in_a_fence_and_behind_thinking_too(verdict, notes, wrapped):
    text = wrapped.format(json.dumps(verdict | {"notes": notes}))
    parsed_verdict = judged(text)["verdict"]
    assert parsed_verdict == verdict | {"notes": notes[:300]}


@given(VERDICTS, NOTES, st.sampled_from(WRAPPED), st.data())
def test_a_cut_answer_is_no_verdict(verdict, notes, wrapped, data):
    full_answer = wrapped.format(json.dumps(verdict | {"notes": notes})).rstrip("`\n ")
    cut = full_answer[: data.draw(st.integers(0, len(full_answer) - 1))]
    for reason in ("stop", "length", "unknown"):
        with pytest.raises(LLMError):
            judged(cut, finish_reason=reason)


@pytest.mark.parametrize(
    "text",
    [
        'Sure: {"pass": true, "reason_code": "ok", "notes": ""}',
        "I cannot judge this.",
        "<think>hm",
        '{"pass": true, "reason_code": "ok", "notes": ""} {"pass": false}',
        "``````",
        "```json```",
        '<think>{"pass": true, "reason_code": "ok", "notes": ""}',
    ],
)
def test_what_holds_more_or_less_than_a_verdict_is_none(text):
    with pytest.raises(LLMError):
        judged(text)


@pytest.mark.parametrize(
    ("rubric", "answer"),
    [
        (FILTER, {"pass": True, "reason_code": "meaning"}),
        (FILTER, {"pass": False, "reason_code": "ok"}),
        (GRADE, {"score": 1.0, "reason_code": "evasive"}),
        (GRADE, {"score": 0.9, "reason_code": "wrong"}),
        (GRADE, {"score": 0.0, "reason_code": "correct"}),
    ],
)
def test_a_verdict_that_its_reason_contradicts_is_none(rubric, answer):
    with pytest.raises(LLMError, match="but reason_code"):
        judged(json.dumps(answer | {"notes": ""}), rubric)


def test_a_partial_answer_may_pass_or_not():
    for score in (0.2, 0.8):
        answer = {"score": score, "reason_code": "partial", "notes": ""}
        assert judged(json.dumps(answer), GRADE)["verdict"]["pass"] is (score > 0.5)


def test_the_shapes_are_part_of_what_a_verdict_depends_on(monkeypatch):
    before = FILTER.digest
    monkeypatch.setattr("services.judge.rubrics.OPENS", re.compile("x"))
    assert load_rubrics()["translation_filter"].digest != before
