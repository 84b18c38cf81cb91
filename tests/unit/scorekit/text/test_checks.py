"""Check measures of translations on real sentences in several scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.languages import MADLAD_IDS
from scorekit.text import checks
from scorekit.text.chat_marks import role_token
from scorekit.text.checks import (
    copied_share,
    language_id,
    language_probability,
    length_band,
    length_ratio,
    looped_share,
    marker,
    repetition,
    script_share,
    scripts_of,
    truncation_sign,
)
from scorekit.text.markup import mask, placeholder_difference
from scorekit.text.meta_text import meta_phrase
from scorekit.text.numbers import compare_numbers

DATA = Path(__file__).parents[4] / "demo/data"
EN = "The weather was so fine that we walked along the river until the evening."
TEXTS = {
    "en": EN,
    "ko": "날씨가 너무 좋아서 우리는 저녁까지 강을 따라 걸었다.",
    "zh": "天气非常好，我们沿着河一直走到了晚上。",
    "ja": "天気がとても良かったので、私たちは夕方まで川沿いを歩きました。",
    "th": "อากาศดีมากจนเราเดินเลียบแม่น้ำไปจนถึงเย็น",
    "ru": "Погода была такой хорошей, что мы гуляли вдоль реки до самого вечера.",
    "ar": "كان الطقس جميلا جدا لدرجة أننا مشينا على طول النهر حتى المساء.",
    "hi": "मौसम इतना अच्छा था कि हम शाम तक नदी के किनारे टहलते रहे।",
    "de": "Das Wetter war so schön, dass wir bis zum Abend am Fluss entlang gegangen sind.",
}


# -- script and language ---------------------------------------------------------------------------


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_in_its_own_script_and_in_no_other(language):
    assert script_share(TEXTS[language], language) == 1.0
    for other in TEXTS:
        if not set(scripts_of(language)) & set(scripts_of(other)):
            assert script_share(TEXTS[language], other) == 0.0


def test_chinese_is_partly_japanese_by_script_and_not_the_other_way_round():
    assert script_share(TEXTS["zh"], "ja") == 1.0
    assert script_share(TEXTS["ja"], "zh") < 0.5


def test_a_mixture_is_a_share():
    assert 0.2 < script_share(TEXTS["ko"] + " " + EN, "ko", EN) < 0.5


def test_names_and_code_do_not_count_as_another_script():
    src = "Use `os.path.join()` of Home Assistant with API_KEY, see https://example.org/docs/en."
    mt = "Home Assistant의 `os.path.join()`을 API_KEY와 함께 쓰세요. https://example.org/docs/en"
    assert script_share(mt, "ko", src) == 1.0
    assert script_share(mt, "ko") < 0.6


@pytest.mark.parametrize(
    ("text", "language"), [("123 …", "ko"), ("", "ko"), ("abc", "xx"), ("`a` {b}", "en")]
)
def test_without_letters_or_language_there_is_no_share(text, language):
    assert script_share(text, language) is None


def test_a_tag_names_its_script_or_implies_it():
    assert scripts_of("sr") == scripts_of("sr-RS") == ("Cyrillic", "Latin")
    assert scripts_of("sr-Latn") == scripts_of("hi_Latn") == ("Latin",)
    assert scripts_of("az-Cyrl") == scripts_of("az_RU") == ("Cyrillic",)
    assert scripts_of("pa-PK") == ("Arabic",) and scripts_of("pa") == ("Gurmukhi",)
    assert scripts_of("zh-TW") == scripts_of("zh-CN") == ("Han",)
    assert scripts_of("tlh") == ()  # its script is unknown


def test_the_scripts_of_three_in_four_of_madlads_languages_are_known():
    with_scripts = [madlad for madlad in MADLAD_IDS if scripts_of(madlad)]
    assert len(with_scripts) > 300 and {"ko", "am", "ka", "dv", "chr"} <= set(with_scripts)


def test_serbian_in_latin_letters_is_not_taken_for_the_source():
    text = "Dobar dan, ovo je kratak tekst o vremenu i gradu u kojem zivimo, napisan latinicom."
    assert language_id(text, ["en", "sr-Latn"])[0] == "sr-Latn"
    assert language_id(text, ["en", "uz-Cyrl"]) is None  # neither is a known candidate


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_is_told_from_english(language):
    best_guess = language_id(TEXTS[language], ["en", language, "fr"])
    assert best_guess is not None and best_guess[0] == language and best_guess[1] > 0.9


def test_language_ids_are_the_callers_and_hebrew_is_known_by_its_madlad_id():
    assert language_id(TEXTS["ko"], ["Korean", "en-US"])[0] == "Korean"
    hebrew = "מזג האוויר היה כל כך נעים שהלכנו לאורך הנהר עד הערב."
    assert language_id(hebrew, ["iw", "en"])[0] == "iw"
    assert language_id(TEXTS["ja"], ["ja", "zh"])[0] == "ja"
    assert language_id(TEXTS["zh"], ["ja", "zh"])[0] == "zh"


@pytest.mark.parametrize("language", TEXTS)
def test_the_probabilities_of_the_languages_add_up(language):
    probabilities = [
        language_probability(TEXTS[language], name, TEXTS.keys() - {name}) for name in TEXTS
    ]
    assert sum(probabilities) == pytest.approx(1)
    assert language_id(TEXTS[language], TEXTS) == (language, pytest.approx(max(probabilities)))


def test_no_probability_of_an_unknown_language_or_of_one_alone():
    assert language_probability(EN, "xx", ["en", "ko"]) is None
    assert language_probability(EN, "en", ["xx"]) is None
    assert language_probability("123", "en", ["ko"]) is None
    assert language_probability(EN, "en", ["xx", "ko"]) > 0.9


def test_nothing_is_said_of_a_text_without_letters_or_of_one_candidate():
    assert language_id("12 %", ["en", "ko"]) is None
    assert language_id(EN, ["en"]) is None
    assert language_id(EN, ["en", "xx"]) is None


# -- length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [name for name in TEXTS if name != "en"])
def test_a_translation_lies_in_its_band_both_ways(other):
    for src, mt, pair in ((EN, TEXTS[other], ("en", other)), (TEXTS[other], EN, (other, "en"))):
        min_ratio, max_ratio = length_band(src, *pair)
        assert min_ratio < length_ratio(src, mt) < max_ratio
        assert length_ratio(src, mt * 6) > max_ratio
        assert length_ratio(src, mt[: len(mt) // 7]) < min_ratio


def test_a_short_source_widens_the_band():
    assert length_band("x" * 40, "en", "ko") == length_band("x" * 400, "en", "ko")
    min_ratio, max_ratio = length_band("x" * 40, "en", "ko")
    wide_min, wide_max = length_band("x" * 10, "en", "ko")
    assert (wide_min, wide_max) == (pytest.approx(min_ratio / 4), pytest.approx(max_ratio * 4))
    assert length_band(TEXTS["zh"], "zh", "en") == length_band(TEXTS["zh"] * 9, "zh", "en")
    min_ratio, max_ratio = length_band("x" * 40, "en", "ko", slack=2)
    assert max_ratio / min_ratio == pytest.approx(4)


def test_empty_texts_have_a_ratio():
    assert length_ratio("", "") == 0.0
    assert length_ratio(" ", "a") == float("inf")
    assert length_ratio("a", "") == 0.0


# -- copies and loops ------------------------------------------------------------------------------


def test_a_copy_is_seen_whatever_its_case_and_spacing():
    assert copied_share(EN, EN) == 1.0
    assert copied_share(EN, EN.upper().replace(" ", "  ")) == 1.0
    assert copied_share(TEXTS["zh"], TEXTS["zh"]) == 1.0
    assert copied_share("Dashboard", "Dashboard") == 1.0
    assert 0.3 < copied_share(EN, TEXTS["ko"] + EN) < 0.8


def test_a_translation_is_no_copy_though_code_links_and_numbers_are():
    src = "Run `pip install scorekit` at https://example.org/a/long/path 1234567890123 times."
    mt = "https://example.org/a/long/path 에서 `pip install scorekit`을 1234567890123번 실행하세요."
    assert copied_share(src, mt) == 0.0
    assert copied_share(EN, TEXTS["de"]) == 0.0
    assert copied_share(EN, "") == 0.0 == copied_share("", EN)


@given(st.text("ab가", max_size=12), st.integers(1, 5), st.text("abc", max_size=30))
def test_the_quick_look_for_a_loop_misses_none(unit, times, context):
    text = context + unit * times + context
    loops = [m for m in checks._LOOP.finditer(text) if any(c.isalnum() for c in m[1])]
    assert looped_share(text) == sum(len(m[0]) for m in loops) / max(1, len(text))


def test_loops_are_measured_against_the_sources_own():
    loop = "나는 갔다. " * 6
    assert looped_share(loop) > 0.9
    assert looped_share("------------ ============") == 0.0
    assert looped_share(EN) == 0.0
    assert repetition(EN, loop) > 0.9
    assert repetition("I went. " * 6, loop) < 0.1
    assert repetition("I went. " * 6, TEXTS["ko"]) == 0.0
    assert looped_share("하하하하하하하하하") == 1.0


# -- what is missing -------------------------------------------------------------------------------


def test_signs_of_a_cut():
    assert truncation_sign(EN, "날씨가 너무 좋아서 우리는") == "no end mark"
    assert truncation_sign(EN, TEXTS["ko"]) is None
    assert truncation_sign("A title", "제목") is None
    assert truncation_sign("It is (very) red.", "그것은 (매우 빨갛다.") == "("
    assert truncation_sign("a (b", "가 (나") is None
    assert truncation_sign("He said “yes”.", "Er sagte „ja“.") is None
    assert truncation_sign("Done. ```x```", "끝. ```x") == "```"
    assert truncation_sign('He said "yes."', "그는 “네.”") is None


@pytest.mark.parametrize(
    ("src", "mt", "difference"),
    [
        ("{name} has %s", "%s: {name}", {}),
        ("{name} has %d", "이름은", {"{name}": -1, "%d": -1}),
        ("{{ user }} and %(n)s", "{{user}} %(n)s %(n)s", {"%(n)s": 1}),
        ('<a href="x">Hi</a><br/>', '<a href="y">안녕</a>', {"<br/>": -1}),
        ("100% sure", "100% 확실", {}),
        ("${HOME}", "", {"${HOME}": -1}),
    ],
)
def test_placeholders_are_counted(src, mt, difference):
    assert placeholder_difference(src, mt) == difference


# -- on many texts ---------------------------------------------------------------------------------

_FRAGMENTS = st.sampled_from(
    [
        "a",
        "The house",
        "집은",
        "家",
        "です",
        "ไทย",
        "{x}",
        "%s",
        "<b>",
        "</b>",
        "<",
        "=",
        "`",
        "```",
        "(",
        "1,000",
        "２",
        "٣",
        ".",
        "。",
        "\n",
        " ",
        "번역:",
        "<think>",
        "<|im_end|>",
        "https://x.org",
        "\ud800",
    ]
)
_TEXT = st.lists(_FRAGMENTS, max_size=40).map("".join) | st.text(max_size=60)


@given(_TEXT, _TEXT)
def test_no_text_is_too_strange(src, mt):
    assert (script_share(mt, "ko", src) or 0.0) <= 1.0
    assert 0.0 <= copied_share(src, mt) <= 1.0
    assert 0.0 <= repetition(src, mt) <= looped_share(mt) <= 1.0
    assert length_ratio(src, mt) >= 0.0
    for match in (meta_phrase(src, mt), role_token(src, mt), marker(src, mt)):
        assert match is None or match in mt
    truncation_sign(src, mt)


@given(_TEXT)
def test_a_text_lacks_nothing_of_itself(text):
    assert placeholder_difference(text, text) == {}
    assert repetition(text, text) == 0.0
    for check in (meta_phrase, role_token, marker, truncation_sign):
        assert check(text, text) is None
    if any(char.isalnum() for char in mask(text).casefold()):
        assert copied_share(text, text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<a " + "=" * 50_000,
        " " * 50_000,
        "." * 50_000 + "x",
        "`" * 50_000,
        "<" * 50_000,
        "a" * 50_000,
        "ab" * 25_000 + "c",
        "1," * 25_000,
        "{" * 50_000,
        "⟦번역 " * 10_000,
    ],
    ids=lambda text: text[:4],
)
def test_hostile_texts_take_no_squared_time(text):
    """Check texts on which a backtracking pattern would hang. A hang is the failure."""
    for check in (
        meta_phrase,
        role_token,
        marker,
        truncation_sign,
        copied_share,
        placeholder_difference,
    ):
        check(text, text[1:])
    looped_share(text)


def test_good_translations_keep_out_of_the_checks():
    """Check the rejection rates on the demo's reference pairs (English-Korean documentation)."""
    lines = (DATA / "pydocs.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [(row["src_text"], row["ref_text"]) for row in map(json.loads, lines[:2000])]
    rejected = {
        "meta": sum(meta_phrase(s, m) is not None for s, m in pairs),
        "role": sum(role_token(s, m) is not None for s, m in pairs),
        "marker": sum(marker(s, m) is not None for s, m in pairs),
        "script": sum(
            (share := script_share(m, "ko", s)) is not None and share < 0.3 and len(m) > 30
            for s, m in pairs
        ),
        "loops": sum(repetition(s, m) > 0.3 for s, m in pairs),
        "numbers": sum(len(compare_numbers(s, m, "en", "ko").missing) > 1 for s, m in pairs),
        "length": sum(
            not low <= length_ratio(s, m) <= high
            for s, m in pairs
            for low, high in [length_band(s, "en", "ko")]
        ),
    }
    assert rejected["meta"] == rejected["role"] == 0
    assert max(rejected.values()) <= 20, rejected  # 1 %
