"""Check which answers match exactly or numerically and which do not."""

from __future__ import annotations

import pytest

from services.judge.answers import judge_answer, normalized, quantity


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
