"""Check where a scored text is found in the completion that it is a part of."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scorekit.credit import DecodeConfig, TokenCredit, align_completion, assign_credit
from scorekit.credit.text_parts import character_map, is_subsequence
from scorekit.errors import UserError
from tests.kits.examples import examples

TAGGED, PLAIN = "no <b>no no</b> yes no", "no no no yes no"
DRAFT, FINAL = "저장 파일. Final: 저장 파일.", "저장 파일."


@cache
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("demo/models/policy")


def credit_of(completion: str, start: int, end: int, **options: Any) -> TokenCredit:
    """Return the credit of a completion with a major error from `start` to `end` of its text."""
    tokenizer = demo_tokenizer()
    ids = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    spans = [{"start": start, "end": end, "severity": "MAJOR"}]
    return assign_credit(tokenizer, ids, spans, **options)


def penalized(completion: str, credit: TokenCredit) -> list[tuple[int, int]]:
    """Return the ranges of the completion whose tokens have a penalty."""
    tokenizer = demo_tokenizer()
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    raw = align_completion(tokenizer, ids, DecodeConfig(lambda text: text)).offsets
    return [offset for offset, reward in zip(raw, credit.rewards, strict=False) if reward]


def without_tags(text: str) -> str:
    return re.sub("<[^>]*>", "", text)


def after_final(text: str) -> str:
    return text.split("Final:")[-1].strip()


@pytest.mark.parametrize(
    "options",
    [{"text": PLAIN}, {"decode_cfg": DecodeConfig(without_tags)}],
    ids=["text", "decode_cfg"],
)
@pytest.mark.parametrize(
    ("span", "position"),
    [((0, 2), (0, 2)), ((3, 5), (6, 8)), ((6, 8), (9, 11)), ((13, 15), (20, 22))],
)
def test_a_word_is_hit_where_it_stands_although_tags_were_removed(
    options: dict[str, Any], span: tuple[int, int], position: tuple[int, int]
) -> None:
    credit = credit_of(TAGGED, *span, **options)
    first, last = position
    hits = penalized(TAGGED, credit)
    assert hits and all(start < last and end > first for start, end in hits)
    assert set(range(*position)) <= {index for hit in hits for index in range(*hit)}


def test_a_text_in_several_places_is_refused_until_its_own_is_named() -> None:
    with pytest.raises(ValueError, match="in several places of the completion: at 0, 14"):
        credit_of(DRAFT, 0, 2, text=FINAL)
    for position in (0, 14):
        credit = credit_of(DRAFT, 0, 2, text=FINAL, text_start=position)
        hits = penalized(DRAFT, credit)
        assert hits and all(position <= end and start < position + 2 for start, end in hits)
        assert credit.method == "bytes"


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize(
    ("postprocess", "position"), [(after_final, 14), (lambda text: text.split(" Final")[0], 0)]
)
def test_a_function_that_cuts_is_asked_which_of_several_places_it_cuts(
    postprocess: Callable[[str], str], position: int, with_text: bool
) -> None:
    text = {"text": FINAL} if with_text else {}
    credit = credit_of(DRAFT, 0, 2, decode_cfg=DecodeConfig(postprocess), **text)
    assert credit == credit_of(DRAFT, 0, 2, text=FINAL, text_start=position)


@pytest.mark.parametrize("function", [lambda _: FINAL, lambda text: FINAL if text == DRAFT else 1])
def test_a_function_whose_place_cannot_be_told_gives_no_positions(function: Any) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer(DRAFT, add_special_tokens=False)["input_ids"]
    alignment = align_completion(tokenizer, ids, DecodeConfig(function))
    assert alignment.method == "ambiguous" and set(alignment.offsets) == {(0, 0)}
    assert alignment.unaligned > 0
    with pytest.raises(ValueError, match="stands in several places of the completion"):
        credit_of(DRAFT, 0, 2, decode_cfg=DecodeConfig(function))


def test_a_function_that_fails_on_a_marked_text_gives_no_positions() -> None:
    def strict(text: str) -> str:
        return {DRAFT: FINAL}[text]

    with pytest.raises(ValueError, match="stands in several places of the completion"):
        credit_of(DRAFT, 0, 2, decode_cfg=DecodeConfig(strict))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": FINAL, "text_start": 1}, "text_start: the text does not begin at index 1"),
        ({"text": FINAL, "text_start": -6}, "text_start: the text does not begin at index -6"),
        ({"text_start": 0}, "text_start: has an effect only with text"),
        (
            {"text": FINAL, "text_start": 0, "decode_cfg": DecodeConfig(after_final)},
            "text_start: has an effect only with text, and without decode_cfg",
        ),
        ({"text": "저장", "decode_cfg": DecodeConfig(after_final)}, "decode_cfg gives the text"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credit_of(DRAFT, 0, 1, **options)


@pytest.mark.parametrize(
    ("completion", "text", "method"),
    [
        ("<b>파일</b> 열기", "파일 열기", "bytes"),  # in one way only
        ("Answer: 파일 열기", "파일 열기", "bytes"),  # one piece, in one place
        (TAGGED, PLAIN, "bytes"),  # every word of the completion is in it
        ("no <b>no</b> no", "no no", "subsequence"),
        ("a  b", "a b", "bytes"),  # white space is all that differs
    ],
)
def test_it_is_said_whether_a_text_is_found_in_one_way_only(
    completion: str, text: str, method: str
) -> None:
    assert credit_of(completion, 0, 1, text=text).method == method


def test_a_rewritten_text_is_told_apart() -> None:
    decode_cfg = DecodeConfig(lambda text: f"{text} [end]")
    assert credit_of("파일", 0, 1, decode_cfg=decode_cfg).method == "rewritten"
    with pytest.raises(UserError, match="returned int"):
        credit_of("파일", 0, 1, decode_cfg=DecodeConfig(lambda _: 1))  # type: ignore[arg-type,return-value]


def positions_in(raw: str, text: str) -> tuple[list[int], bool]:
    """Return the place of each character of a text, and whether that is the only way."""
    new_index, is_only = character_map(text, raw)
    return [new_index.index(target) for target in range(len(text)) if target in new_index], is_only


@settings(max_examples=examples(100))
@given(st.text("ab<", min_size=1, max_size=11), st.data())
def test_a_subsequence_is_found_whole_in_order_and_in_the_fewest_pieces(
    raw: str, data: st.DataObject
) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(raw), max_size=len(raw)))
    text = "".join(c for c, is_in_text in zip(raw, flags, strict=True) if is_in_text)
    positions, is_only = positions_in(raw, text)
    ways = [
        way
        for way in combinations(range(len(raw)), len(text))
        if "".join(raw[position] for position in way) == text
    ]
    assert tuple(positions) in ways
    assert is_only == (len(ways) == 1)
    assert breaks(positions) == min(map(breaks, ways))


def breaks(positions: Any) -> int:
    return sum(after != before + 1 for before, after in pairwise(positions))


@settings(max_examples=examples(200))
@given(st.text("ab <\n", max_size=20), st.text("ab <\n", max_size=20))
def test_every_map_is_in_order_and_maps_equal_characters(raw: str, text: str) -> None:
    new_index, _ = character_map(text, raw)
    targets = [target for target in new_index if target >= 0]
    assert targets == sorted(set(targets))
    assert all(raw[i] == text[target] for i, target in enumerate(new_index) if target >= 0)
    if is_subsequence(text, raw):
        visible = {index for index, character in enumerate(text) if not character.isspace()}
        assert visible <= set(targets)


@pytest.mark.parametrize(
    ("raw", "text", "positions"),
    [
        ("a <b>bold</b> x", "a bold x", [0, 1, 5, 6, 7, 8, 13, 14]),  # not the b of the tag
        ("in to <i>into</i> it", "into it", [9, 10, 11, 12, 17, 18, 19]),  # no space inside
        ("a \n b", "a\nb", [0, 2, 4]),
        ("a <i> </i> b", "a  b", [0, 1, 10, 11]),
        ("ab", "a b", [0, 1]),
    ],
)
def test_words_are_kept_together(raw: str, text: str, positions: list[int]) -> None:
    assert positions_in(raw, text)[0] == positions
