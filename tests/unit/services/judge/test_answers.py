"""Check which answers match exactly or numerically and which do not."""

from __future__ import annotations

import json

import pytest

from scorekit.errors import SampleError
from services.judge.rules import judge_answer, judge_any_of, normalized, quantity


def score(answer: str, reference: str) -> float:
    outcome = judge_answer({"query": "q", "answer": answer, "reference": reference})
    verdict = outcome["verdict"]
    assert verdict["pass"] == (outcome["score"] == 1.0)
    assert verdict["reason_code"] == ("correct" if verdict["pass"] else "wrong")
    return outcome["score"]


EXACT = [
    ("Seoul", " seoul. "),
    ("The Netherlands", "netherlands"),
    ("대한민국입니다.", "대한민국"),
    ("서울 특별시", "서울특별시"),
    ("서울이다", "서울"),
    ("ＫＯＲＥＡ", "Korea"),
    ("high-income", "high income"),
    ('"Gross domestic product"', "gross domestic product"),
    ("2007–2008", "2007-2008"),
    ("1,234 and 5", "1234 and 5"),
    ("Côte d'Ivoire", "CÔTE D’IVOIRE"),
]


@pytest.mark.parametrize(("answer", "reference"), EXACT)
def test_equal_texts_match_whatever_their_marks(answer, reference):
    assert score(answer, reference) == score(reference, answer) == 1.0


NUMERIC = [
    ("72.4", "72.40"),
    ("72.4 years", "72.4"),
    ("1,200,000", "1.2 million"),
    ("120만", "1,200,000"),
    ("120만 명입니다", "1.2 million people"),
    ("3조 5천억 원", "3,500,000,000,000 won"),
    ("1만 2,300", "12300"),
    ("2억", "200000000"),
    ("천2백", None),
    ("2천3백", "2300"),
    ("12%", "12 percent"),
    ("12퍼센트", "12 %"),
    ("$5", "5 dollars"),
    ("₩1,000", "1000원"),
    ("-3.5%", "−3.5 %"),
    ("約 5", None),
]


@pytest.mark.parametrize(("answer", "reference"), NUMERIC)
def test_one_quantity_matches_in_any_spelling(answer, reference):
    if reference is None:
        assert quantity(answer) is None
    else:
        assert score(answer, reference) == score(reference, answer) == 1.0


DIFFERENT = [
    ("", ""),
    ("", "Seoul"),
    ("Seoul", "Busan"),
    ("72.4", "72.5"),
    ("not 72.4", "72.4"),
    ("72.4 or 80", "72.4"),
    ("1 2", "12"),
    ("no where", "nowhere"),
    ("12%", "0.12"),
    ("12 %", "12 people"),
    ("5 dollars", "5 euros"),
    ("12 percent", "12 percentage points"),
    ("-5", "5"),
    ("12만", "12"),
    ("1.2 million", "1.2 billion"),
    ("I do not know", "72.4"),
    ("모임", "모"),
    ("...", "!!!"),
]


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_what_differs_is_wrong(answer, reference):
    assert score(answer, reference) == score(reference, answer) == 0.0


def test_no_text_takes_long_or_fails():
    for text in ("9" * 100_000, "1," * 50_000, "- " * 50_000, "조" * 50_000, "1조" * 40, "$", "-"):
        normalized(text)
        quantity(text)
        assert score(text, "1") in (0.0, 1.0)


def any_of(answer: str, references: object) -> float | None:
    texts = {"query": "q", "answer": answer, "references": json.dumps(references)}
    outcome = judge_any_of(texts)
    return None if isinstance(outcome, SampleError) else outcome["score"]


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("24,000,000", ["twenty-four", "24 million"]),
        ("10 %, white", [["White", "10%"]]),
        ("White and 10 percent", [["10%", "White"]]),
        ("['Circle', 'Rectangle']", ["shapes", ["Rectangle", "Circle"]]),
        ("1,200 and 3,400", [["1200", "3400"]]),
        ("서울 및 부산", [["부산", "서울"]]),
        (
            "Monitoring of landslides and earthquakes; sericulture",
            [["Sericulture", "Monitoring of landslides and earthquakes"]],
        ),
        ("x, x", [["x", "x"]]),
    ],
)
def test_an_answer_is_right_if_any_reference_matches_in_any_order(answer, references):
    assert any_of(answer, references) == 1.0


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("25 million", ["24 million", "24"]),
        ("White", [["White", "10%"]]),
        ("White, 10%, red", [["White", "10%"]]),
        ("White, White", [["White", "10%"]]),
        ("x", [["x", "x"]]),
        ("", [["White"]]),
    ],
)
def test_an_answer_with_other_or_missing_parts_is_wrong(answer, references):
    assert any_of(answer, references) == 0.0


@pytest.mark.parametrize("references", [[], "24", {"a": 1}, [1], [[]], [["a", 1]], [[["a"]]]])
def test_references_in_another_form_are_refused(references):
    assert any_of("24", references) is None


def test_references_that_are_no_json_are_refused():
    texts = {"query": "q", "answer": "a", "references": "[" * 100_000}
    assert isinstance(judge_any_of(texts), SampleError)
