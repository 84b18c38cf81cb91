"""Check that a rewritten thought has the meaning of the original and adds nothing."""

from __future__ import annotations

import pytest

from trainer.search.steps.fidelity import departure

CLAIM = "I can see the revenue was 12.5 million in 2021. Now find 2020."
GOAL = "I need to find the number of births in Korea in 1990."
KO_SEEN = "표에 2019년 값 35가 보인다. 2018년 값을 더 찾아야 한다."
KO_GOAL = "출생아 수를 찾아야 한다."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GOAL, "I should find the number of births in Korea in 1990."),
        (GOAL, "The number of births in Korea in 1990 is what I need to find."),
        (CLAIM, "I can see the revenue was 12.5 million in 2021. Now I need to find 2020."),
        (
            "look for the table of rainfall by month",
            "Let me search for the rainfall table by month",
        ),
        ("not on exports; search again", "Not on exports, so I will search again."),
        ("maybe it is in the appendix, try it", "Maybe it is in the appendix, so let me try it."),
        (KO_GOAL, "먼저 출생아 수를 찾을 필요가 있다."),
        (KO_SEEN, "표에 2019년 값 35가 보인다. 이제 2018년 값을 더 찾아야 한다."),
    ],
)
def test_other_words_for_the_same_are_let_through(before: str, after: str) -> None:
    assert departure(before, after) is None


@pytest.mark.parametrize(
    "more",
    [
        "There were 649,738 births.",
        "Births fell.",
        "The header lists regions.",
        "Half of them are women.",
        "I found it.",
        "The first is it.",
        "So I have it now.",
        "출생아 수가 줄었다.",
        "답은 여기 있다.",
    ],
)
@pytest.mark.parametrize("before", [CLAIM, GOAL, KO_SEEN, KO_GOAL])
def test_nothing_is_added(before: str, more: str) -> None:
    assert departure(before, f"{before} {more}") is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CLAIM, CLAIM.replace("12.5", "12.6")),
        (CLAIM, CLAIM.replace("million", "billion")),
        (CLAIM, CLAIM.replace("revenue", "profit")),
        (CLAIM, CLAIM.replace("2021", "X").replace("2020", "2021").replace("X", "2020")),
        ("This is about exports, not imports.", "This is about imports, not exports."),
        ("Sales in Japan beat sales in China.", "Sales in China beat sales in Japan."),
        ("It rose from 5 to 7.", "It rose to 5 from 7."),
        ("no page has it", "one page has it"),
        ("the text is not small", "the text is small"),
        (KO_SEEN, KO_SEEN.replace("35", "53")),
        ("이 페이지에는 수출만 있다.", "이 페이지에는 수출이 없다."),
        ("일본 매출이 중국 매출보다 크다.", "일본 매출보다 중국 매출이 크다."),
        ("A가 B를 이겼다.", "A를 B가 이겼다."),
    ],
)
def test_the_content_of_a_claim_is_not_swapped(before: str, after: str) -> None:
    assert departure(before, after) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("maybe the answer is in the appendix", "the answer is in the appendix"),
        ("which might be the peak", "which is the peak"),
        ("is it the page on wages? search it", "it is the page on wages. search it"),
        (GOAL, "I found the number of births in Korea in 1990."),
        (GOAL, "I have the number of births in Korea in 1990."),
        (KO_GOAL, "출생아 수를 찾았다."),
        ("답이 부록에 있을 수도 있다", "답이 부록에 있다"),
        ("그 값이 맞는지 확인해야 한다.", "그 값이 맞다."),
    ],
)
def test_a_thought_becomes_no_surer(before: str, after: str) -> None:
    assert departure(before, after) is not None


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (GOAL, "한국의 출생아 수를 찾아야 한다.", "another language"),
        (KO_GOAL, "I need to find it.", "another language"),
        (GOAL, "Нужно найти births in Korea.", "another language"),
        (GOAL, "Ich suche die Zahl.", "new content"),
        (GOAL, "Je cherche births en Korea en 1990.", "new content"),
    ],
)
def test_the_language_stays(before: str, after: str, reason: str) -> None:
    assert departure(before, after) == reason
