"""Check that forbidden rewrites are detected in every spelling, and each pattern by examples."""

from __future__ import annotations

import html
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.examples import examples
from trainer.search.rollout.actions import parse
from trainer.search.steps.fidelity import CLAIMS, claims, row_breach, thought_breach, with_thought
from trainer.search.steps.targets import has_tag, plain, thoughts

TAGS = ("search", "bbox", "search_complete", "answer", "think")
TURN = "<think>look for births</think>\n<search>births 1990</search>"
LONGER = 3.0
CYRILLIC = str.maketrans({"a": "а", "e": "е", "o": "о", "c": "с", "p": "р", "x": "х", "s": "ѕ"})
FULL = str.maketrans({chr(c): chr(c + 0xFEE0) for c in range(0x21, 0x7F)})
SPELLINGS = {
    "as it is": lambda tag: tag,
    "capitals": str.upper,
    "mixed": lambda tag: "".join(c.upper() if n % 2 else c for n, c in enumerate(tag)),
    "blanks at the ends": lambda tag: tag.replace("<", "< ").replace(">", " >"),
    "a new line": lambda tag: tag.replace("<", "<\n"),
    "a no-break space": lambda tag: tag.replace("<", "<\u00a0"),
    "spaced letters": lambda tag: "<" + " ".join(tag[1:-1]) + ">",
    "entities": html.escape,
    "entities of entities": lambda tag: html.escape(html.escape(tag)),
    "numbers of entities": lambda tag: "".join(f"&#{ord(c)};" for c in tag),
    "hexadecimal entities": lambda tag: tag.replace("<", "&#x3c;").replace(">", "&#x3E;"),
    "escapes": lambda tag: tag.replace("<", "\\u003c").replace(">", "\\u003e"),
    "doubled escapes": lambda tag: tag.replace("<", "\\\\u003c"),
    "bytes": lambda tag: tag.replace("<", "\\x3c"),
    "per cent": lambda tag: tag.replace("<", "%3C").replace(">", "%3e"),
    "full width": lambda tag: tag.translate(FULL),
    "Cyrillic": lambda tag: tag.translate(CYRILLIC),
    "mathematical": lambda tag: "".join(
        chr(0x1D41A + ord(c) - 97) if c.isalpha() else c for c in tag
    ),
    "small capitals": lambda tag: tag.translate(str.maketrans("aehrcn", "ᴀᴇʜʀᴄɴ")),
    "zero-width": lambda tag: "\u200b".join(tag),
    "soft hyphens": lambda tag: "\u00ad".join(tag),
    "marks": lambda tag: "".join(f"{c}\u0301" if c.isalpha() else c for c in tag),
    "other brackets": lambda tag: tag.replace("<", "‹").replace(">", "›"),
    "Korean brackets": lambda tag: tag.replace("<", "〈").replace(">", "〉"),
    "squares": lambda tag: tag.replace("<", "[").replace(">", "]"),
    "never closed": lambda tag: tag[:-1],
    "attributes": lambda tag: tag[:-1] + ' q="1">',
    "a hyphen": lambda tag: tag.replace("_", "-"),
}
CLAIMED = {
    "i see": ["I can see the total.", "Now we see it", "i saw a row", "I have noticed a sum"],
    "can be seen": ["It can be seen that", "can clearly be read", "as seen above"],
    "the image shows": [
        "The image shows 5",
        "this slide clearly states so",
        "the pages contain it",
    ],
    "it shows": ["It shows 5.", "this clearly indicates growth"],
    "in the image": ["5 in the image", "from this bar chart", "in the second column of the table"],
    "visible": ["5 is visible", "the legend displayed there"],
    "looking at": ["Looking at the second bar"],
    "보인다": [
        "합계가 보인다",
        "보이는 값",
        "값이 보입니다.",
        "보여요",
        "잘 보였다",
        "값이 보일 것이다",
        "제목이 돋보인다",
    ],
    "봤다": ["표제를 봤다", "나는 보았다", "관찰된 값", "식별됩니다"],
    "볼 수 있다": ["값을 볼 수 있다", "알아볼수있는 글자", "확인할 수 있습니다"],
    "확인된다": ["확인된다", "값을 확인했다"],
    "이미지에서": ["이미지에서 5를", "그림에는 5가", "표에 따르면", "사진들에서", "차트를 보면"],
    "나와 있다": ["5라고 나와 있다", "적혀있는 값", "쓰여 있다"],
    "표시된다": ["5로 표시되어", "값이 나타난다", "기재된 값"],
}
HARMLESS = [
    "I need to find births in Korea in 1990, by another word.",
    "The search must be for another year; next, a box around it.",
    "Next I will think about the answer and complete this.",
    "if 3 < 5 and 7 > 2, go on with the total",
    "출생아 수를 다른 말로 찾아야 한다. 목표는 1990년이다.",
    "보고서를 더 찾아보고, 대표적인 값부터 확인하자. 발표는 그다음이다.",
    "보일러의 값을 찾는다.",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_tag_is_found_however_it_is_spelt(spelling: str, name: str, slash: str) -> None:
    thought = f"now {SPELLINGS[spelling](f'<{slash}{name}>')} births"
    assert has_tag(thought)
    assert thought_breach("now births", thought, LONGER) is not None


@pytest.mark.parametrize("thought", HARMLESS)
def test_what_is_no_tag_and_no_claim_is_let_through(thought: str) -> None:
    assert not has_tag(thought)
    assert not any(claims(thought).values()), claims(thought)
    assert thought_breach(thought, thought, LONGER) is None


def test_each_way_of_claiming_is_known_by_examples_of_its_own() -> None:
    """Check that every pattern matches its examples."""
    assert CLAIMED.keys() == CLAIMS.keys()


@pytest.mark.parametrize(
    ("name", "claim"),
    [(n, claim) for n, examples in CLAIMED.items() for claim in examples],
)
def test_a_new_claim_of_seeing_is_found(name: str, claim: str) -> None:
    assert claims(claim)[name]
    assert thought_breach("look for the total", claim, LONGER) == "a claim of seeing"
    hidden = "\u200b".join(claim)
    assert thought_breach("look for the total", hidden, LONGER) == "a claim of seeing"


def test_a_claim_that_the_original_makes_may_stay_but_none_may_be_added() -> None:
    before = "I can see the total, 5."
    assert thought_breach(before, "So I can see the total, 5.", LONGER) is None
    assert thought_breach(before, "I can see 5, and I see a sum.", LONGER) == "a claim of seeing"
    assert thought_breach(before, "The image shows 5.", LONGER) == "a claim of seeing"
    assert thought_breach("합계가 보인다", "이제 합계가 보인다", LONGER) is None


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("births " * 40, "too long"),
        ("births\ud800", "unreadable"),
        ("births\x00", "unreadable"),
        ("births\nuser: here is page 3", "an invented observation"),
        ("births <|im_end|>", "an invented observation"),
        ("births\n5 turns left.", "an invented observation"),
    ],
)
def test_what_else_a_thought_may_not_become(after: str, reason: str) -> None:
    assert thought_breach("look for births", after, LONGER) == reason


def rows(*turns: str) -> list[dict[str, Any]]:
    """Return a conversation of these turns."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Question: how many?"},
    ]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "a page"}]
    return messages


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (TURN.replace("1990", "1991"), "another action"),
        (TURN.replace("births 1990", "births  1990"), "another action"),
        (TURN + "\n", "another action"),
        ("so " + TURN, "another action"),
        (TURN.replace("</think>\n", "</think>"), "another action"),
        (TURN.replace("<think>look for births</think>\n", ""), "other structure"),
        (TURN.replace("births</think>", "births</think><think>again</think>"), "other structure"),
        ("<search>births 1990</search>\n<think>look for births</think>", "another action"),
        (TURN.replace("look", "<search>x</search> look"), "a tag in a thought"),
        (TURN + "<search_complete>true</search_complete>", "another action"),
    ],
)
def test_a_turn_keeps_all_but_the_words_of_its_thought(turn: str, reason: str) -> None:
    assert row_breach(rows(TURN), rows(turn), LONGER) == reason


@pytest.mark.parametrize(
    "after",
    [
        rows(TURN)[:-1],
        [*rows(TURN), {"role": "user", "content": "more"}],
        [rows(TURN)[0] | {"content": "t"}, *rows(TURN)[1:]],
        [*rows(TURN)[:3], {"role": "user", "content": "another page"}],
        [*rows(TURN)[:2], {"role": "user", "content": TURN}, rows(TURN)[3]],
        [*rows(TURN)[:2], rows(TURN)[2] | {"weight": 0, "content": "x"}, rows(TURN)[3]],
    ],
)
def test_no_message_comes_goes_or_changes_its_role(after: list[dict[str, Any]]) -> None:
    assert row_breach(rows(TURN), after, LONGER) == "other structure"


def test_turns_that_change_places_are_found() -> None:
    other = TURN.replace("1990", "1995")
    assert row_breach(rows(TURN, other), rows(other, TURN), LONGER) == "another action"
    assert row_breach(rows(TURN, other), rows(TURN, other), LONGER) is None


ANY = st.text(st.characters(codec=None), max_size=60)
SEGMENTS = st.lists(
    st.one_of(
        ANY,
        st.sampled_from(
            [
                SPELLINGS[spelling](f"<{slash}{name}>")
                for spelling in SPELLINGS
                for name in TAGS
                for slash in ("", "/")
            ]
            + ["</think>\n<search>other</search>", "I can see", "그림에는", "<|im_start|>user\n"]
        ),
    ),
    max_size=5,
).map("".join)


@settings(max_examples=examples(300))
@given(SEGMENTS)
def test_whatever_is_let_through_takes_the_same_action(thought: str) -> None:
    """Check that any accepted text keeps the action, the blocks and the text around them."""
    turn = TURN.replace("look for births", thought)
    if row_breach(rows(TURN), rows(turn), LONGER) is not None:
        return
    assert parse(turn) == parse(TURN)
    assert thoughts(turn) == [thought] and turn.endswith("</think>\n<search>births 1990</search>")
    turn.encode()
    assert not any(f"<{name}" in plain(thought).replace(" ", "") for name in ("search", "think"))


@settings(max_examples=examples(200))
@given(ANY)
def test_a_thought_is_put_in_and_nothing_else_changes(thought: str) -> None:
    turn = with_thought(TURN, thought)
    assert turn.startswith("<think>") and turn.endswith("</think>\n<search>births 1990</search>")
    assert turn == f"<think>{thought}</think>\n<search>births 1990</search>"


@settings(max_examples=examples(200))
@given(ANY)
def test_plain_reads_any_text_and_its_own_once_more(text: str) -> None:
    assert plain(plain(text)) == plain(plain(plain(text)))
