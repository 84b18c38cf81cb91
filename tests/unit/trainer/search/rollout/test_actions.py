"""Check how turns are parsed: every error reason and arbitrary texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.search.rollout.actions import DETAILS, Complete, Crop, Invalid, Search, parse

SEARCH = "<search>births 1990</search>"
BOX = "<bbox>[1, 2, 30.5, 40]</bbox>"
END = "<search_complete>true</search_complete>"
THINK = "<think>why</think>\n"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (THINK + SEARCH, Search("births 1990")),
        (f" \n{THINK}{SEARCH}\n", Search("births 1990")),
        (THINK + "<search>\n 두  개의\t질의 \n</search>", Search("두 개의 질의")),
        (f"{THINK} \n\ufeff{SEARCH}\u200b \n", Search("births 1990")),  # invisible characters
        (THINK + "<search>3 < 4 & <b>5</b></search>", Search("3 < 4 & <b>5</b>")),
        ("<think>.</think>" + BOX, Crop((1.0, 2.0, 30.5, 40.0))),
        (THINK + "<bbox>\n[-1,0,1e2,4]\n</bbox>", Crop((-1.0, 0.0, 100.0, 4.0))),
        (THINK + END, Complete(True)),
        (THINK + "<search_complete> TRUE\n</search_complete>", Complete(True)),
        (THINK + "<search_complete>false</search_complete>", Complete(False)),
        (THINK + "<search_complete></search_complete>", Complete(False)),
        (THINK + "<search_complete>true, I think</search_complete>", Complete(False)),
        ("<think>the search tag, or bbox</think>" + SEARCH, Search("births 1990")),
    ],
)
def test_one_action_behind_one_think_is_read(text, action) -> None:
    assert parse(text) == action


FAULTS: dict[str, list[str]] = {
    "no_think": ["", SEARCH, "garbage", END],
    "text_before_think": ["Well. " + THINK + SEARCH, SEARCH + THINK, SEARCH + THINK + END],
    "unclosed_think": [
        "<think>why " + SEARCH,
        "why</think>" + SEARCH,
        "</think><think>" + SEARCH,
        "<think><think>why</think>" + SEARCH,
        "<think>a</think>b</think>" + SEARCH,
    ],
    "several_thinks": [THINK + THINK + SEARCH, THINK + SEARCH + THINK],
    "empty_think": [
        "<think></think>" + SEARCH,
        "<think> \n\t</think>\n" + END,
        "<think>\u200b\ufeff</think>" + BOX,
        "<think>\u3164 \u2800</think>" + BOX,
        "<think></think>",
    ],
    "tag_in_think": [
        f"<think>{SEARCH}</think>{END}",
        f"<think>{END}</think>",
        "<think>with <bbox> now</think>" + SEARCH,
        f"<think>{SEARCH}</think>",
        f"<think>{SEARCH}<answer>7</answer></think>",
        "<think>a < / SEARCH ></think>" + SEARCH,
    ],
    "misspelt_tag": [
        "<Think>why</Think>" + SEARCH,
        "< think>why</think>" + SEARCH,
        THINK + "<Search>a</Search>",
        THINK + "<search >a</search>",
        THINK + "<search>a</ search>",
        THINK + "<search/>",
    ],
    "unclosed_tag": [
        THINK + "<search>births",
        THINK + "births</search>",
        THINK + "<search>births</bbox>",
        THINK + "</search>births<search>",
        THINK + "<search>a <bbox>[1,2,3,4]</bbox></search>",
        THINK + SEARCH + "<bbox>",
    ],
    "no_action": [THINK, THINK + "I am done.", THINK + "search: births"],
    "several_actions": [THINK + SEARCH + SEARCH, THINK + SEARCH + "\n" + END, THINK + BOX + BOX],
    "text_beside_action": [
        THINK + "I look. " + SEARCH,
        THINK + SEARCH + " Done.",
        THINK + SEARCH + "\n.",
        THINK + "```\n" + BOX + "\n```",
        THINK + "<action>" + END + "</action>",
        THINK + "왜냐하면\n" + END,
        THINK + "x<search></search>",  # before errors of the action itself
    ],
    "answer": [
        THINK + "<answer>7</answer>",
        THINK + END + "<answer>7</answer>",
        f"<think>it is <answer>7</answer></think>{END}",
        f"<think>so < / Answer ></think>{SEARCH}",
        f"<think><answer></think>{END}",
        f'<think><answer id="1">42</think>{END}',
    ],
    "empty_query": [THINK + "<search></search>", THINK + "<search> \n </search>"],
    "unreadable_query": [
        THINK + "<search>a\0b</search>",
        THINK + "<search>a\ud800b</search>",
        THINK + "<search>\x1b[31m</search>",
    ],
    "overlong_query": [THINK + f"<search>{'a' * 1001}</search>"],
    "box_form": [
        THINK + f"<bbox>{body}</bbox>"
        for body in (
            "",
            "1, 2, 3, 4",
            "[1, 2, 3]",
            "[1, 2, 3, 4, 5]",
            "[1, 2, 3, 4",
            "[1, 2, 3, 4] [5, 6, 7, 8]",
            '["1", 2, 3, 4]',
            "[true, 2, 3, 4]",
            "[null, 2, 3, 4]",
            "[[1, 2], [3, 4]]",
            '{"box": [1, 2, 3, 4]}',
            "[1, 2, 3, NaN]",
            "[1, 2, 3, Infinity]",
            "[1, 2, 3, 1e999]",
            f"[1, 2, 3, {'9' * 400}]",
            "[1, 2, 3, 4]\ud800",
            "(1, 2, 3, 4)",
        )
    ],
}


@pytest.mark.parametrize(
    ("reason", "text"), [(reason, text) for reason, texts in FAULTS.items() for text in texts]
)
def test_every_fault_has_its_own_reason(reason, text) -> None:
    assert parse(text) == Invalid(reason)


def test_every_reason_has_a_case_and_its_words() -> None:
    assert set(FAULTS) == set(DETAILS)
    assert all(Invalid(reason).detail for reason in FAULTS)


_FRAGMENTS = [
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<bbox>",
    "</bbox>",
    "true",
    "[1,2,3,4]",
]
_FRAGMENTS += [
    "<search_complete>",
    "</search_complete>",
    "<answer>",
    "<Search>",
    " ",
    "a",
    "\n",
    "\0",
]


_FORM = re.compile(
    r"\s*<think>((?:(?!</think>).)*[^\s\0](?:(?!</think>).)*)</think>\s*"
    r"<(search|bbox|search_complete)>((?:(?!<).)*)</\2>\s*",
    re.DOTALL,
)
_TAGS = re.compile(r"</?(think|search|bbox|search_complete|answer)>", re.IGNORECASE)


@given(st.one_of(st.text(), st.lists(st.sampled_from(_FRAGMENTS)).map("".join)))
def test_any_text_is_an_action_or_has_a_reason(text) -> None:
    action = parse(text)
    assert parse(text) == action and isinstance(action, Search | Crop | Complete | Invalid)
    if not isinstance(action, Invalid):
        # Check the documented form independently: a thought without tags and exactly one action.
        assert _FORM.fullmatch(text) and not _TAGS.search(_FORM.fullmatch(text)[1])


@given(st.text(st.characters(exclude_characters="<>")), st.text("abc 가나다", min_size=1))
def test_the_action_does_not_hang_on_what_is_thought(thought, words) -> None:
    thought += "."
    expected = Search(" ".join(words.split())) if words.strip() else Invalid("empty_query")
    assert parse(f"<think>{thought}</think>\n<search>{words}</search>") == expected


@pytest.mark.parametrize("tag", ["<", "</", "<search", "<bbox /", "< think", "< answer"])
def test_a_tag_that_never_ends_takes_no_time(tag) -> None:
    """Check long unclosed tags, which would take hours in quadratic time."""
    blanks = " \n" * 500_000
    assert parse(f"{THINK}{tag}{blanks}{SEARCH}") == Invalid("text_beside_action")
    assert parse(f"<think>{tag}{blanks}</think>{END}") == Complete(True)


@given(st.lists(st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6), min_size=4, max_size=4))
def test_a_box_is_read_as_it_was_written(sides) -> None:
    text = f"<think>.</think><bbox>[{', '.join(map(str, sides))}]</bbox>"
    assert parse(text) == Crop(tuple(map(float, sides)))


def test_a_reason_without_a_message_for_the_policy_is_refused_at_once():
    with pytest.raises(ValueError, match="'tpyo' is no reason"):
        Invalid("tpyo")
