"""Check that wrong calls of credit assignment are refused, and that other containers are taken.

Each case here gave a wrong result without a word, or is the right call beside such a case.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scorekit.credit import (
    assign_credit,
    combine_sources,
    compute_advantages,
    covered_tokens,
    spans_to_token_rewards,
)
from tests.kits.trainer.runs import byte_level_tokenizer

TEXT = "abcdefgh"
TOKENS = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 8)]
MAJOR = {"start": 2, "end": 4, "severity": "major"}
HIT = [0.0, -5.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "offsets", [TOKENS, tuple(TOKENS), np.array(TOKENS), torch.tensor(TOKENS), iter(TOKENS)]
)
def test_spans_may_be_dicts_and_offsets_any_container(offsets: Any) -> None:
    assert spans_to_token_rewards(TEXT, offsets, (span for span in [MAJOR])) == HIT


def test_special_tokens_may_stand_anywhere() -> None:
    """Check (0, 0), the position that tokenizers give to a special token between others."""
    offsets = [(0, 2), (0, 0), (2, 4), (0, 0), (4, 8)]
    for start, hit in ((0, 0), (2, 2), (4, 4)):
        span = {"start": start, "end": start + 1, "severity": "MINOR"}
        rewards = spans_to_token_rewards(TEXT, offsets, [span])
        assert [index for index, reward in enumerate(rewards) if reward] == [hit]
    assert covered_tokens(TEXT, offsets, 4) == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TEXT.encode(), TOKENS, [MAJOR]), "mt_text: a bytes"),
        ((list(TEXT), TOKENS, [MAJOR]), "mt_text: a list"),
        ((TEXT, [(0, 2), (2, 9)], [MAJOR]), r"token_char_offsets\[1\]: 2-9 in a text of 8"),
        ((TEXT, [(0, 2), (-2, 4)], [MAJOR]), r"token_char_offsets\[1\]: -2-4"),
        ((TEXT, [(4, 6), (0, 2)], [MAJOR]), r"token_char_offsets\[1\]: 0-2 comes after 4-6"),
        ((TEXT, [(0, 8), (2, 4)], [MAJOR]), r"token_char_offsets\[1\]: 2-4 comes after 0-8"),
        ((TEXT, [(4, 2)], [MAJOR]), r"token_char_offsets\[0\]: 4-2 in"),
        ((TEXT, [(0.0, 2.0)], [MAJOR]), r"token_char_offsets\[0\]: \(0.0, 2.0\) is no"),
        ((TEXT, [(True, 2)], [MAJOR]), r"token_char_offsets\[0\]: \(True, 2\) is no"),
        ((TEXT, [2, 4], [MAJOR]), r"token_char_offsets\[0\]: 2 is no \(start, end\)"),
        ((TEXT, TOKENS, MAJOR), "error_spans: a dict. Give a list"),
        ((TEXT, TOKENS, [(2, 4, "MAJOR")]), r"error_spans\[0\]: "),
        ((TEXT, TOKENS, [MAJOR, {"start": 2, "end": 4}]), r"error_spans\[1\]: severity"),
        ((TEXT, TOKENS, [MAJOR], {"MAJOR": 5.0}), "severity_weights.MAJOR: 5.0 would reward"),
    ],
)
def test_what_does_not_fit_the_text_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spans_to_token_rewards(*arguments)


def test_a_text_is_no_flag() -> None:
    with pytest.raises(ValueError, match="use_confidence: 'false' is no bool"):
        spans_to_token_rewards(TEXT, TOKENS, [MAJOR], use_confidence="false")  # type: ignore[arg-type]


@pytest.mark.parametrize("mt_covered", [-1, 2.5, float("nan"), None, True])
def test_a_number_of_characters_is_a_number(mt_covered: Any) -> None:
    with pytest.raises(ValueError, match="mt_covered: "):
        covered_tokens(TEXT, TOKENS, mt_covered)


@pytest.mark.parametrize(
    ("penalties", "message"),
    [
        ([], "no service"),
        ([[0.0, -1.0], [0.0]], r"penalties\[1\]: 1 tokens, the first has 2"),
        ([[0.0, -1.0], [float("nan"), 0.0]], r"penalties\[1\]\[0\]: nan"),
        ([[0.0, 1.0]], r"penalties\[0\]\[1\]: 1.0"),
    ],
)
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_penalties_are_numbers_of_at_most_0(penalties: Any, message: str, combine: Any) -> None:
    with pytest.raises(ValueError, match=message):
        combine_sources(penalties, combine)


def test_penalties_may_be_arrays() -> None:
    rows = [[0.0, -1.0], [-3.0, -2.0]]
    for penalties in (np.array(rows), torch.tensor(rows), [np.array(row) for row in rows]):
        assert combine_sources(penalties) == [-3.0, -3.0]
        assert combine_sources(penalties, "max") == [-3.0, -2.0]


REWARDS, GROUPS = [1.0, 2.0, 3.0, 5.0], [0, 0, 1, 1]
TOKEN_REWARDS, VALID = [[0.0, -1.0]] * 4, [[True, True]] * 4


@pytest.mark.parametrize("norm", ["batch", "group", "grpo"])
@pytest.mark.parametrize("convert", [np.array, torch.tensor, iter])
def test_advantages_of_arrays_are_those_of_lists(convert: Any, norm: Any) -> None:
    """Check groups above all: elements of a tensor equal none, and each would be a group."""
    expected = compute_advantages(REWARDS, TOKEN_REWARDS, VALID, GROUPS, norm=norm)
    assert any(value for row in expected for value in row)
    arrays = [convert(values) for values in (REWARDS, TOKEN_REWARDS, VALID, GROUPS)]
    actual = compute_advantages(*arrays, norm=norm)
    assert actual == expected
    assert all(type(value) is float for row in actual for value in row)
    groups = [torch.tensor(group) for group in GROUPS]
    assert compute_advantages(REWARDS, TOKEN_REWARDS, VALID, groups, norm=norm) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid": [[-100, 7]] * 4}, r"valid\[0\]\[0\]: -100 is no bool"),
        ({"valid": [["False", "True"]] * 4}, r"valid\[0\]\[0\]: 'False' is no bool"),
        ({"groups": [float("nan")] * 4}, r"groups\[0\]: nan is no name"),
        ({"groups": [[0]] * 4}, r"groups\[0\]: \[0\] is no name"),
        ({"center": "no"}, "center: 'no' is no bool"),
    ],
)
def test_flags_and_groups_that_mean_nothing_are_refused(changes: Any, message: str) -> None:
    arguments = {
        "rewards": REWARDS,
        "token_rewards": TOKEN_REWARDS,
        "valid": VALID,
        "groups": GROUPS,
    }
    with pytest.raises(ValueError, match=message):
        compute_advantages(**(arguments | changes))


def test_ids_may_be_any_container_and_a_mask_is_no_ids() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    stop = {"text": TEXT, "stop_ids": [tokenizer.eos_token_id]}
    expected = assign_credit(tokenizer, ids, [MAJOR], **stop)
    assert expected.rewards.count(-5.0) == 2
    for other in (np.array(ids), torch.tensor(ids), iter(ids)):
        assert assign_credit(tokenizer, other, [MAJOR], **stop) == expected
    with pytest.raises(ValueError, match="completion_token_ids: True is no token id"):
        assign_credit(tokenizer, [True] * len(ids), [])
    with pytest.raises(ValueError, match="text: a bytes"):
        assign_credit(tokenizer, ids, [], text=TEXT.encode())  # type: ignore[arg-type]


def test_no_spans_are_an_empty_list() -> None:
    with pytest.raises(ValueError, match="error_spans: a NoneType"):
        spans_to_token_rewards("ab", [(0, 2)], None)  # type: ignore[arg-type]
