"""Check numbers by value: other forms of a number pass, other numbers do not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorekit.text.numbers import compare_numbers, expected_numbers


def missing_numbers(src, mt, source, target):
    return list(compare_numbers(src, mt, source, target).missing)


# -- words of a value, each language's own way -----------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


_EN = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_EN_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_DE = _words(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn"
)
_DE_TENS = _words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_KO_TENS = _words("열 스물 서른 마흔 쉰 예순 일흔 여든 아흔")
_KO_ONES = _words("한 두 세 네 다섯 여섯 일곱 여덟 아홉")


def english(value: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand")):
        if value >= size:
            remainder = f" {english(value % size)}" if value % size else ""
            return f"{english(value // size)} {name}{remainder}"
    if value >= 100:
        remainder = f" and {english(value % 100)}" if value % 100 else ""
        return f"{_EN[value // 100]} hundred{remainder}"
    if value >= 20:
        return _EN_TENS[value // 10 - 2] + (f"-{_EN[value % 10]}" if value % 10 else "")
    return _EN[value]


def german(value: int) -> str:
    for size, singular, plural in (
        (10**9, "Milliarde", "Milliarden"),
        (10**6, "Million", "Millionen"),
    ):
        if value >= size:
            count, remainder = divmod(value, size)
            head = f"eine {singular}" if count == 1 else f"{german(count)} {plural}"
            return f"{head} {german(remainder)}" if remainder else head
    if value >= 1000:
        return german(value // 1000) + "tausend" + (german(value % 1000) if value % 1000 else "")
    if value >= 100:
        return _DE[value // 100] + "hundert" + (german(value % 100) if value % 100 else "")
    if value >= 20:
        return (f"{_DE[value % 10]}und" if value % 10 else "") + _DE_TENS[value // 10 - 2]
    return _DE[value]


def _by_four(value: int, digits: str, units: str, scales: str, spell_one: str) -> str:
    groups = []
    for scale in ("", *scales):
        value, group = divmod(value, 10_000)
        text = ""
        for unit in ("", *units):
            group, digit = divmod(group, 10)
            if digit:
                text = (
                    ("" if digit == 1 and unit and not spell_one else digits[digit]) + unit + text
                )
        groups.append(text + scale if text else "")
    return "".join(reversed(groups))


def korean(value: int) -> str:
    return _by_four(value, "영일이삼사오육칠팔구", "십백천", "만억조", "")


def chinese(value: int) -> str:
    return _by_four(value, "零一二三四五六七八九", "十百千", "万亿兆", "一")


WORDS = {"en": english, "de": german, "ko": lambda value: korean(value) + " 명", "zh": chinese}


@example(value=4_001_000_000, pair=("de", "en"))  # "vier Milliarden eine Million"
@example(value=1_001_001_001, pair=("en", "de"))
@given(
    value=st.one_of(st.integers(11, 9999), st.integers(11, 10**12 - 1)),
    pair=st.sampled_from([(a, b) for a in WORDS for b in WORDS if a != b]),
)
def test_digits_and_words_of_a_value_are_the_same_either_way(value, pair):
    source, target = pair
    assert missing_numbers(f"{value}", f"({WORDS[target](value)})", source, target) == []
    grouped = f"{value:,}".replace(",", "." if target == "de" else ",")
    assert missing_numbers(f"({WORDS[source](value)})", grouped, source, target) == []


@given(value=st.integers(2, 10**9), pair=st.sampled_from(["en-ko", "ko-de", "zh-en", "de-zh"]))
def test_a_number_that_is_gone_is_missing(value, pair):
    source, target = pair.split("-")
    assert missing_numbers(f"({value})", "()", source, target) == [str(value)]
    if value > 100:  # smaller values may be part of another: "3:30", half a year
        assert missing_numbers(f"({value})", f"({value + 7})", source, target) == [str(value)]


@given(value=st.integers(1, 99))
def test_native_korean_counts_to_a_hundred(value):
    words = ["", *_KO_TENS][value // 10] + ["", *_KO_ONES][value % 10]
    words = "스무" if value == 20 else words
    assert missing_numbers(f"{value} came.", f"학생 {words} 명이 왔다.", "en", "ko") == []


# -- forms -----------------------------------------------------------------------------------------

#: Each line has texts with the same numbers in several languages, the first ones in digits.
SAME = [
    {"ko": "300만 명", "en": "3 million people", "de": "3 Mio. Menschen", "zh": "三百万人"},
    {"ko": "1억 2천만 원", "en": "120 million won", "de": "120 Millionen Won", "zh": "1.2亿韩元"},
    {"ko": "3만 5,000대", "en": "35,000 cars", "de": "35.000 Autos", "zh": "三万五千辆汽车"},
    {"ko": "35억 유로", "en": "3.5bn euros", "de": "3,5 Milliarden Euro", "zh": "35亿欧元"},
    {
        "ko": "250만 개",
        "en": "two and a half million",
        "de": "zweieinhalb Millionen",
        "zh": "两百五十万个",
    },
    {"ko": "300여만 명", "en": "some 3 million", "de": "rund 3 Millionen", "zh": "300多万人"},
    {"ko": "1월 3일", "en": "January 3", "de": "3. Januar", "zh": "一月三日"},
    {"ko": "12월 25일", "en": "25 December", "de": "25. Dezember", "zh": "十二月二十五日"},
    {"ko": "4명", "en": "four people", "de": "vier Menschen", "zh": "四个人"},
    {"ko": "2번째", "en": "the second time", "de": "das zweite Mal", "zh": "第二次"},
    {
        "ko": "21세기",
        "en": "the twenty-first century",
        "de": "das 21. Jahrhundert",
        "zh": "二十一世纪",
    },
    {"ko": "1990년대", "en": "the 1990s", "de": "die 90er-Jahre", "zh": "上世纪90年代"},
    {"ko": "1980년대", "en": "the eighties", "de": "die achtziger Jahre", "zh": "八十年代"},
    {"ko": "2019년", "en": "twenty nineteen", "de": "2019", "zh": "二〇一九年"},
    {"ko": "오후 3시", "en": "3 p.m.", "de": "15 Uhr", "zh": "下午三点"},
    {"ko": "15:30", "en": "3:30 p.m.", "de": "15:30 Uhr", "zh": "下午三点半"},
    {"ko": "30%", "en": "30 percent", "de": "30 Prozent", "zh": "百分之三十"},
    {"ko": "3할", "en": "30 %", "de": "30 Prozent", "zh": "三成"},
    {"ko": "50%", "en": "half", "de": "die Hälfte", "zh": "一半"},
    {"ko": "3분의 2", "en": "two thirds", "de": "zwei Drittel", "zh": "三分之二"},
    {"ko": "2.5배", "en": "2.5 times", "de": "das 2,5-fache", "zh": "2.5倍"},
    {"ko": "2배", "en": "double", "de": "doppelt", "zh": "两倍"},
    {"ko": "24개", "en": "two dozen", "de": "zwei Dutzend", "zh": "24个"},
    {"ko": "18개월", "en": "18 months", "de": "anderthalb Jahre", "zh": "一年六个月"},
    {"ko": "24개월", "en": "two years", "de": "zwei Jahre", "zh": "两年"},
    {"ko": "30분", "en": "half an hour", "de": "eine halbe Stunde", "zh": "半小时"},
    {"ko": "３千 명", "en": "３,０００ people", "de": "3 000 Menschen", "zh": "３千人"},
]


@pytest.mark.parametrize("forms", SAME, ids=lambda forms: forms["en"])
def test_forms_of_a_number_are_the_same(forms):
    if forms["ko"].startswith("３千"):
        forms = forms | {"ko": "3천 명"}
    for source, src in forms.items():
        for target, mt in forms.items():
            assert missing_numbers(src, mt, source, target) == [], (src, mt)
    assert expected_numbers(forms["ko"], "ko")


#: One quantity in two units and in one unit.
UNITS = [
    {
        "en": "7 hours and 30 minutes",
        "ko": "7시간 30분",
        "zh": "7小时30分钟",
        "de": "7 Stunden und 30 Minuten",
    },
    {"en": "seven and a half hours", "ko": "7시간 반", "zh": "七个半小时", "de": "7,5 Stunden"},
    {"en": "7.5 hours", "ko": "일곱 시간 반", "zh": "7.5小时", "de": "siebeneinhalb Stunden"},
]


@pytest.mark.parametrize("text_by_language", UNITS)
@pytest.mark.parametrize("other_texts", UNITS)
def test_a_quantity_may_be_told_in_two_units_or_in_one(text_by_language, other_texts):
    for source, src in text_by_language.items():
        for target, mt in other_texts.items():
            assert missing_numbers(src, mt, source, target) == [], (src, mt)


@pytest.mark.parametrize(
    ("ko", "en"),
    [
        ("1시간 45분이다.", "It takes 105 minutes."),
        ("2년 6개월", "two and a half years"),
        ("1미터 78센티미터", "178 centimeters"),
        ("2m 50cm", "2.5 meters"),
        ("1,345원 20전", "1,345.2 won"),
        ("3달러 99센트", "$3.99"),
        ("3할 4푼 9리", "a batting average of .349"),
        ("승률 5할 7푼", "57 percent of the games"),
    ],
)
def test_units_within_a_number_are_read_either_way(ko, en):
    assert missing_numbers(ko, en, "ko", "en") == missing_numbers(en, ko, "en", "ko") == []


ALTERED = [
    ("ko", "7시간 30분", "en", "seven hours and forty minutes", ["30"]),
    ("en", "7.5 hours", "ko", "7시간 40분", ["7.5"]),
    ("ko", "7시간 30분", "en", "7.3 hours", ["30"]),
    ("ko", "5시간 6명", "en", "506 people", ["5", "6"]),
    ("en", "3 dollars and 5 people", "ko", "305명", ["3", "5"]),
    ("en", "The 2 m 5 kg pole", "ko", "막대기 205 kg", ["2", "5"]),
    ("ko", "5년 6월 사건", "en", "66 cases", ["5", "6"]),
    ("ko", "2조 원을 넘겼다.", "en", "It topped 2 won.", ["2조"]),
    ("ko", "3할 4푼 9리", "en", "batting .394", ["0.349"]),
    ("ko", "300만 명", "en", "300 people", ["300만"]),
    ("ko", "300만 명", "en", "30 million people", ["300만"]),
    ("ko", "1월 3일", "en", "February 3", ["1"]),
    ("ko", "1억 2천만 원", "zh", "1.2万韩元", ["1억 2천만"]),
    ("en", "3.5 million", "de", "3,6 Millionen", ["3.5 million"]),
    ("en", "in the 1990s", "ko", "1980년대에", ["1990"]),
    ("en", "at 15:30", "ko", "오후 4시 30분에", ["15:30"]),
    ("en", "twenty-five people", "zh", "三十五个人", ["twenty-five"]),
    ("de", "dreihundert Menschen", "en", "two hundred people", ["dreihundert"]),
    ("de", "1.234,5 Liter", "en", "1,235 litres", ["1.234,5"]),
    ("zh", "三百万人", "ko", "30만 명", ["三百万"]),
    ("zh", "百分之三十", "en", "13 percent", ["百分之三十"]),
    ("en", "12, 48 and 96", "ko", "12쪽과 48쪽", ["96"]),
]


@pytest.mark.parametrize(("source", "src", "target", "mt", "missing"), ALTERED)
def test_another_number_is_missing(source, src, target, mt, missing):
    assert missing_numbers(src, mt, source, target) == missing


FREE = [
    ("en", "CO2 and an A380 with COVID-19", "no number, but names"),
    ("en", "See https://example.org/2024/12 and {0}", "links and placeholders"),
    ("en", "one of them, a hundred times", "words that need be no number"),
    ("en", "100% sure", "emphasis"),
    ("ko", "이 조건에 대기 중인 모든 작업", "a word that begins like a number"),
    ("ko", "10년 만에 1등", "10 alone is a number"),
    ("ko", "6·25 전쟁", "the name of a day"),
    ("zh", "万一失败，请看一看", "in case"),
    ("de", "Wer ein BIOS hat, achtet auf Elfenbein", "words that begin like numbers"),
]


@pytest.mark.parametrize(("language", "src", "reason"), FREE)
def test_what_is_no_number_is_not_asked_for(language, src, reason):
    assert expected_numbers(src, language) == (["10"] if "10년" in src else []), reason


def test_of_a_language_without_a_table_nothing_is_said():
    assert expected_numbers("12", "ko-KR") == expected_numbers("12", "zh-TW") == ["12"]
    assert expected_numbers("12", "Swahili") == []
    assert missing_numbers("12 pages", "kurasa", "en", "sw") == []
    assert missing_numbers("kurasa 12", "pages", "sw", "en") == []
    assert missing_numbers("12 pages", "", "en", "no such language") == []


def test_digits_without_end_are_read_in_part():
    digits = "7" * 100_000
    assert missing_numbers(digits, f"({digits})", "en", "ko") == []
    assert missing_numbers(digits, "7", "en", "ko") == [digits]


@given(src=st.text(max_size=80), mt=st.text(max_size=80), pair=st.sampled_from(["en-ko", "zh-de"]))
def test_any_text_can_be_asked(src, mt, pair):
    source, target = pair.split("-")
    assert set(missing_numbers(src, mt, source, target)) <= set(expected_numbers(src, source))


_FRAGMENTS = [
    *"0123456789.,:/-%' 만억조천백십일이삼반분의개월년시명",
    *"零〇一二两半十百千万亿点分之年月个世纪代成",
    *_words(
        "zero one twenty half thirds quarter hundred million and a null ein zwei einund zwanzig"
    ),
    *_words(
        "hundert tausend Millionen halb drittel 분의 세기 년대 世纪 年代 '90s p.m. 12.500 1 000"
    ),
]


@given(
    text=st.lists(st.sampled_from(_FRAGMENTS), max_size=30).map("".join),
    language=st.sampled_from(["ko", "zh", "de", "en"]),
)
def test_a_text_has_its_own_numbers(text, language):
    assert missing_numbers(text, text, language, language) == []


# -- certain errors and doubtful cases -------------------------------------------------------------

CERTAIN = [
    ("de", "Es kostet 1.234 Euro.", "en", "It costs 1.234 euros."),
    ("en", "It rose from 3.4 percent.", "ko", "4.3퍼센트에서 올랐다."),
    ("en", "We have 2 cats and 3 dogs.", "ko", "고양이 3마리와 개 2마리가 있다."),
    ("en", "It was 25 men and 40 women.", "de", "Es waren 40 Männer und 25 Frauen."),
    ("en", "Sales hit 3 million won.", "ko", "매출은 30만 원이었다."),
    ("en", "about 30,000 people", "zh", "约3亿人"),
    ("de", "Es kostet 2,5 Euro.", "en", "It costs 25 euros."),
    ("en", "It opened in 2019.", "ko", "2091년에 열었다."),
    ("en", "There were 12 of them.", "ko", "그들은 87명이었다."),
    ("de", "Am 31.12.2023 war es kalt.", "en", "It was cold on New Year's Eve of 2024."),
    ("de", "Es waren 31,12 Punkte.", "en", "It was 44.1 points."),
    ("ko", "평균 6.25점을 받았다.", "en", "The average was 9.31."),
    ("en", "I walked 10,000 steps.", "ko", "하지만 보았다."),
    ("en", "I walked 10,000 steps.", "ko", "만보기를 샀다."),
    ("en", "I walked 10,000 steps.", "ko", "천 보를 걸었다."),
]
#: A day and a month in words that no rule covers.
DAYS = [
    ("ko", "6.25 전쟁", "en", "the Korean War"),
    ("ko", "6.25를 겪은 세대", "en", "those who lived through the Korean War"),
    ("ko", "12.25(월) 휴무", "en", "closed on Christmas Monday"),
    ("ko", "2023. 12. 25. 휴무", "en", "closed on Christmas 2023"),
    ("ko", "12/25에 15명이 왔다.", "en", "15 came on Christmas, at 20 o'clock."),
    ("de", "am 31.12.", "en", "on New Year's Eve"),
    ("de", "am 31.12 um 20 Uhr", "en", "on New Year's Eve at 8 p.m."),
    ("de", "am 24. 12.", "en", "on Christmas Eve, from 17 on"),
    ("de", "am 24. Dez.", "en", "on Christmas Eve, from 17 on"),
    ("de", "Am 31.12.2023 war es kalt.", "en", "It was cold on New Year's Eve of 2023."),
    ("en", "on 12/24", "de", "an Heiligabend, ab 17 Uhr"),
    ("en", "on 24 Dec", "de", "an Heiligabend, ab 17 Uhr"),
    ("zh", "12.24那天", "en", "on Christmas Eve"),
    ("zh", "10.1国庆节", "ko", "국경절"),
]
DOUBTFUL = [
    ("en", "This is the 3rd time.", "ko", "이번이 4번째다."),
    ("en", "Sales hit 3 billion won.", "ko", "매출은 3억 원이었다."),
    ("zh", "3万人", "en", "3 million people"),
    ("ko", "값은 1,742원이다.", "en", "It costs 1.742 won."),
    ("ko", "1월 1일에 닫는다.", "en", "It is closed on New Year's Day."),
    ("ko", "12월 25일에 만났다.", "en", "They met on Christmas Day."),
    ("ko", "20세기 초의 건물이다.", "en", "It is a building of the early 1900s."),
    ("en", "It is open 24/7.", "ko", "연중무휴다."),
    ("en", "Of the 30 who came, 12 were women.", "ko", "온 사람 가운데 12명이 여자, 모두 30명."),
    ("en", "Pages 12 and 12 are gone.", "ko", "12쪽과 21쪽이 없다."),
    ("en", "It was -5 degrees.", "ko", "5도였다."),
    ("ko", "영하 5도였다.", "de", "Es waren 5 Grad."),
    ("zh", "5度", "en", "-5 degrees"),
]
SURE = [
    ("en", "It is 15,000 feet high.", "ko", "높이는 4.5킬로미터다."),
    ("en", "It is 50 miles away.", "ko", "80킬로미터 떨어져 있다."),
    ("ko", "후반 45분에 골이 터졌다.", "en", "The goal came in the 90th minute."),
    ("ko", "18개월이 걸렸다.", "en", "It took a year and a half."),
    ("ko", "7시간 30분 걸린다.", "en", "It takes 7.5 hours."),
    ("ko", "0이 아닌 값", "en", "a nonzero value"),
    ("en", "2 cats and 3 dogs", "ko", "고양이 2마리와 개 3마리"),
    ("de", "Er ist 2,5 Meter groß.", "en", "He is 2.5 metres tall."),
    ("en", "I walked 10,000 steps.", "ko", "만 보를 걸었다."),
    ("en", "10,000 steps a day", "ko", "하루 만보 걷기"),
    ("ko", "만여 명이 왔다.", "en", "More than 10,000 came."),
    ("en", "1,000 copies", "ko", "천 부"),
    ("en", "100 poems", "ko", "백 편의 시"),
    ("en", "It was -5 degrees.", "ko", "영하 5도였다."),
    ("en", "It was -5 degrees.", "zh", "零下5度"),
    ("en", "from 10 -20", "ko", "10에서 20까지"),
]


def verdict(source, src, target, mt):
    comparison = compare_numbers(src, mt, source, target)
    if comparison.certain or comparison.swapped or comparison.conflicts:
        return "certain"
    doubts = (*comparison.missing, *comparison.likely, *comparison.doubts)
    return "doubtful" if doubts else "sure"


@pytest.mark.parametrize("case", CERTAIN)
def test_a_number_that_no_idiom_explains_is_certainly_wrong(case):
    assert verdict(*case) == "certain"


@pytest.mark.parametrize("case", DAYS)
def test_a_day_and_a_month_are_never_certainly_missing(case):
    assert verdict(*case) == "doubtful"


@pytest.mark.parametrize("case", DOUBTFUL)
def test_what_may_be_said_otherwise_or_misread_is_doubtful(case):
    assert verdict(*case) == "doubtful"


@pytest.mark.parametrize("case", SURE)
def test_the_same_numbers_leave_no_doubt(case):
    assert verdict(*case) == "sure"
