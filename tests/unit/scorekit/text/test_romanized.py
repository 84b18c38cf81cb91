"""Check which words are names of the source in Latin letters."""

from __future__ import annotations

import pytest

from scorekit.text.romanized import is_surely_romanized, without_romanized


@pytest.mark.parametrize(
    ("src", "text", "remaining"),
    [
        ("부산 해운대", "Haeundae, Busan", ""),
        ("김민수 교수", "Professor Kim Minsu", "Professor"),
        ("박지성", "Park Ji-sung", ""),
        ("정우성과 이영애", "Jung Woo-sung and Lee Young-ae", "and"),
        ("경복궁", "Gyeongbokgung Palace", "Palace"),
        ("창덕궁", "Changdeokgung", ""),
        ("신라 시대", "the Silla period", "the period"),
        ("마포구 양화로 45", "45 Yanghwa-ro, Mapo-gu", "45"),
        ("제주도", "Insel Jeju", "Insel"),
        ("그의 자전거", "His bike Haeundae", "His bike Haeundae"),
    ],
)
def test_words_that_sound_like_the_korean_source_are_left_out(src, text, remaining):
    assert without_romanized(text, src, "ko").replace(",", "").split() == remaining.split()


def test_words_of_chinese_syllables_are_left_out():
    assert without_romanized("Wang Xiaoming visits Hangzhou", "王小明去杭州", "zh").split() == [
        "visits"
    ]
    assert without_romanized("Flughafen Pudong", "浦东机场", "zh").split() == ["Flughafen"]
    assert without_romanized("Wang", "abc", "zh") == "Wang"
    assert is_surely_romanized("Wang Xiaoming", "zh-CN")
    assert not is_surely_romanized("Meine Lange", "zh")


def test_other_sources_leave_the_text_unchanged():
    assert without_romanized("Kim Minsu", "キムミンス", "ja") == "Kim Minsu"
