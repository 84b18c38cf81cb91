"""Check what counts as a word of a page or query."""

from __future__ import annotations

import pytest

from services.retriever.backends.bm25 import Words
from tests.kits.retrieval.korean import morphemes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Exports of STEEL, 2.5%", ["exports", "of", "steel", "2.5"]),
        ("1,200 tons (1200)", ["1200", "tons", "1200"]),
        ("GDP2024 ＧＤＰ", ["gdp", "2024", "gdp"]),
        ("naïve café", ["naïve", "café"]),
        ("人口統計", ["人口", "口統", "統計"]),
        ("", []),
        ("?! …", []),
        ("데이터", ["데이", "이터"]),
        ("한 줄", ["한", "줄"]),
        ("水", ["水"]),
        ("水 价格", ["水", "价格"]),
        ("“물”", ["물", "물*"]),
    ],
)
def test_words_without_a_model(text, words):
    assert Words("bigrams").of_query(text) == words


def test_particles_and_endings_are_no_words():
    first, second = (
        morphemes().of_page("서울의 인구가 줄었다"),
        morphemes().of_page("인구는 서울에서 줄어든다"),
    )
    assert {"서울", "인구", "줄"} <= set(first) and {"서울", "인구"} <= set(second)
    assert not {"의", "가", "는", "에서"} & {*first, *second}
    assert morphemes().of_page("GDP가 2.5% 늘었다")[:2] == ["gdp", "2.5"]


def test_each_chinese_character_of_a_page_is_a_word_and_the_first_syllable_of_a_korean_word():
    assert Words("bigrams").of_page("人口統 물을 값") == [
        *("人口", "口統", "人", "口", "統"),
        *("물을", "물*"),
        "값",
    ]


def test_a_noun_of_one_syllable_is_a_word_even_if_it_reads_as_a_verb():
    assert morphemes().of_query("금")[0] != "금" and "금" in morphemes().of_query("금")
    assert "금" in morphemes().of_page("금과 은")
    assert morphemes().of_query("물").count("물") == 1
