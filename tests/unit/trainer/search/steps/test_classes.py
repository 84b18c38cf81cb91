"""Every combination of agreements has the class in the table of docs/how-to/curate.md."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from trainer.search.steps.agreement import (
    AGREEMENTS,
    CLASSES,
    Compared,
    class_of,
    most_agree,
    same_but_form,
    same_text,
    stance_of,
)
from trainer.search.steps.verify import VerifyConfig

DROP = VerifyConfig().drop
SURE = [Compared("sure", *levels) for levels in product(AGREEMENTS, repeat=3)]
#: Agreement of generator and reference, verifier and reference, generator and verifier -> class.
#: If two pairs agree, all three do.
TABLE = {
    (True, True, True): {"OK", "FORMAT_DIFF"},
    (True, True, False): {"OK", "FORMAT_DIFF"},
    (True, False, True): {"OK", "FORMAT_DIFF"},
    (False, True, True): {"FORMAT_DIFF"},
    (False, True, False): {"GEN_ERROR"},
    (False, False, True): {"GT_ERROR"},
    (True, False, False): {"outvoted"},
    (False, False, False): {"BOTH_WRONG"},
}
OUTVOTED = ("OK", "UNCERTAIN")


def same(level) -> bool:
    return level in ("form", "yes")


@pytest.mark.parametrize("outvoted", OUTVOTED)
def test_every_combination_has_the_class_of_the_table(outvoted):
    assert len(SURE) == 27
    for compared in SURE:
        pairs = (
            compared.generator_reference,
            compared.verifier_reference,
            compared.generator_verifier,
        )
        (*classes,) = TABLE[tuple(map(same, pairs))]
        expected = outvoted if classes == ["outvoted"] else classes[0]
        if len(classes) == 2:  # all three agree: the judge decides about the form
            expected = "OK" if compared.generator_reference == "yes" else "FORMAT_DIFF"
        assert class_of(compared, outvoted) == expected, compared


@pytest.mark.parametrize("stance", ["unsure", "differs"])
def test_a_verifier_who_does_not_know_makes_a_row_uncertain_whatever_the_others_say(stance):
    levels = (*AGREEMENTS, None)
    for agreements in product(AGREEMENTS, levels, levels):
        assert class_of(Compared(stance, *agreements), "OK") == "UNCERTAIN"


@pytest.mark.parametrize("outvoted", OUTVOTED)
def test_more_agreement_with_the_reference_never_drops_a_row(outvoted):
    def is_kept(compared: Compared) -> bool:
        return class_of(compared, outvoted) not in DROP

    for compared in SURE:
        for name in ("generator_reference", "verifier_reference"):
            higher = AGREEMENTS[AGREEMENTS.index(getattr(compared, name)) + 1 :]
            for level in higher:
                assert is_kept(compared) <= is_kept(compared._replace(**{name: level})), compared


def test_what_is_dropped_is_that_of_the_facts():
    assert DROP == ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN")
    assert VerifyConfig(drop=["UNCERTAIN", "GT_ERROR"]).drop == ("GT_ERROR", "UNCERTAIN")


def test_the_document_names_every_class():
    text = (Path(__file__).parents[5] / "docs/how-to/curate.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in CLASSES)


@pytest.mark.parametrize(
    ("agreements", "expected"),
    [
        (["yes"], "yes"),
        (["yes", "no"], "no"),  # half is not more than half
        (["yes", "yes", "no"], "yes"),
        (["yes", "form", "no"], "form"),
        (["form", "no", "no"], "no"),
    ],
)
def test_several_answers_agree_where_more_than_half_do(agreements, expected):
    assert most_agree(agreements) == expected


@pytest.mark.parametrize(
    ("groups", "unsure", "consensus", "expected"),
    [
        ([3], 0, 1.0, "sure"),
        ([2, 1], 0, 1.0, "differs"),
        ([2, 1], 0, 0.51, "sure"),
        ([1, 1], 0, 0.51, "differs"),
        ([2], 1, 1.0, "differs"),
        ([2], 1, 0.51, "sure"),
        ([1], 2, 0.51, "unsure"),
        ([], 3, 1.0, "unsure"),
        ([14], 11, 0.56, "sure"),  # 0.56 * 25 is 14.000000000000002
        ([14], 12, 0.56, "differs"),
    ],
)
def test_the_verifier_is_sure_of_what_enough_of_its_answers_say(
    groups, unsure, consensus, expected
):
    assert stance_of(groups, unsure, consensus) == expected


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("12,570 dollars", "12570 Dollars."),
        ("１２,５７０", "12570"),
        ("3.0 %", "3 %"),
        ("12,570", "12,570 dollars"),
        ("$5", "5"),
        ("1,234명", "1234"),
        ("South Korea", "south-korea"),
    ],
)
def test_the_same_in_another_form(a, b):
    assert same_but_form(a, b) and same_but_form(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("5", "5 million"),
        ("5만", "5"),
        ("3.5 million", "3.5 billion"),
        ("1.5", "15"),
        ("-5", "5"),
        ("not 5", "5"),
        ("May 5", "5"),
        ("Iran", "Iran and Iraq"),
        ("5 km", "5 miles"),
        ("5 and 6", "6 and 5"),
        ("", ""),
        ("...", "!"),
    ],
)
def test_what_may_mean_something_else_is_no_form_of_it(a, b):
    assert not same_but_form(a, b) and not same_but_form(b, a)


def test_the_same_text():
    assert same_text(" South  KOREA", "south korea") and not same_text("a b", "ab")
