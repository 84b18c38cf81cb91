"""Check what counts as a word of a page or query."""

from __future__ import annotations

import pytest

from services.retriever.backends.words import Words


@pytest.fixture(scope="module")
def morphemes():
    return Words("morphemes")


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
    ],
)
def test_words_without_a_model(text, words):
    assert Words("bigrams").tokenize(text) == words


def test_particles_and_endings_are_no_words(morphemes):
    first, second = (
        morphemes.tokenize("서울의 인구가 줄었다"),
        morphemes.tokenize("인구는 서울에서 줄어든다"),
    )
    assert {"서울", "인구", "줄"} <= set(first) and {"서울", "인구"} <= set(second)
    assert not {"의", "가", "는", "에서"} & {*first, *second}
    assert morphemes.tokenize("GDP가 2.5% 늘었다")[:2] == ["gdp", "2.5"]
