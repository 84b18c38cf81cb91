"""Check the lookup of languages by any of their names and tags."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit import languages
from scorekit.languages import (
    MADLAD_IDS,
    add_language,
    find_language,
    language_name,
    unknown_language,
)
from scorekit.text.writing_scripts import scripts_of
from tests.kits.examples import examples


@pytest.mark.parametrize("key", ["ko", "kor", "ko-KR", "Korean", "KOREAN", "ko_KR", " ko "])
def test_every_name_finds_korean(key):
    assert find_language(key) == ("ko", "kor", "ko-KR", "Korean")


#: The former table's names, on which prompts and exports of existing configs depend.
BEFORE = """
ar ara ar-EG Arabic|bg bul bg-BG Bulgarian|bn ben bn-IN Bengali|ca cat ca-ES Catalan
cs ces cs-CZ Czech|da dan da-DK Danish|de deu de-DE German|el ell el-GR Greek|en eng en-US English
es spa es-MX Spanish|et est et-EE Estonian|fa fas fa-IR Farsi|fi fin fi-FI Finnish
fil fil fil-PH Filipino|fr fra fr-FR French|gu guj gu-IN Gujarati|iw heb he-IL Hebrew
hi hin hi-IN Hindi|hr hrv hr-HR Croatian|hu hun hu-HU Hungarian|id ind id-ID Indonesian
is isl is-IS Icelandic|it ita it-IT Italian|ja jpn ja-JP Japanese|kn kan kn-IN Kannada
ko kor ko-KR Korean|lt lit lt-LT Lithuanian|lv lav lv-LV Latvian|ml mal ml-IN Malayalam
mr mar mr-IN Marathi|nl nld nl-NL Dutch|no nor no-NO Norwegian|pa pan pa-IN Punjabi
pl pol pl-PL Polish|pt por pt-BR Portuguese|ro ron ro-RO Romanian|ru rus ru-RU Russian
sk slk sk-SK Slovak|sl slv sl-SI Slovenian|sr srp sr-RS Serbian|sv swe sv-SE Swedish
sw swa sw-KE Swahili|ta tam ta-IN Tamil|te tel te-IN Telugu|th tha th-TH Thai
tr tur tr-TR Turkish|uk ukr uk-UA Ukrainian|ur urd ur-PK Urdu|vi vie vi-VN Vietnamese
zh zho zh-CN Chinese|zu zul zu-ZA Zulu
"""


@pytest.mark.parametrize("row", BEFORE.replace("\n", "|").strip("|").split("|"))
def test_the_common_languages_are_called_as_ever(row):
    for key in row.split():
        assert find_language(key) == tuple(row.split()), key


@pytest.mark.parametrize("madlad", MADLAD_IDS)
def test_every_language_of_madlad_is_found_and_stays_itself(madlad):
    language = find_language(madlad)
    assert language is not None and language.madlad == madlad
    assert language.name and language.iso639_3 and language.name != madlad
    assert find_language(madlad.replace("_", "-").upper()) == language
    assert find_language(language.iso639_3).iso639_3 == language.iso639_3
    if "_" not in madlad:
        assert find_language(language.tag)[:3] == language[:3]


def test_madlad_has_419_languages():
    assert len(set(MADLAD_IDS)) == len(MADLAD_IDS) == 419


@pytest.mark.parametrize(
    ("key", "tag", "name"),
    [
        ("zh-TW", "zh-TW", "Traditional Chinese (Taiwan)"),
        ("zh_tw", "zh-TW", "Traditional Chinese (Taiwan)"),
        ("zh-Hant", "zh-Hant", "Traditional Chinese"),
        ("zh-hant-hk", "zh-Hant-HK", "Traditional Chinese (Hong Kong)"),
        ("zh-CN", "zh-CN", "Simplified Chinese"),
        ("cmn-TW", "zh-TW", "Traditional Chinese (Taiwan)"),
        ("zh", "zh-CN", "Chinese"),
        ("sr-Latn", "sr-Latn", "Serbian (Latin script)"),
        ("sr-Cyrl", "sr-Cyrl", "Serbian (Cyrillic script)"),
        ("hi-Latn", "hi-Latn", "Hindi (Latin script)"),
        ("az-Cyrl", "az-Cyrl", "Azerbaijani (Cyrillic script)"),
        ("pt-BR", "pt-BR", "Portuguese (Brazil)"),
        ("pt-PT", "pt-PT", "Portuguese (Portugal)"),
        ("en-GB", "en-GB", "English (United Kingdom)"),
        ("en-US", "en-US", "English"),
        ("ko-KR", "ko-KR", "Korean"),
        ("es-419", "es-419", "Spanish (Latin America)"),
        ("nb", "nb-NO", "Norwegian Bokmål"),
        ("yue", "yue-HK", "Cantonese"),
    ],
)
def test_a_variant_stays_what_it_is(key, tag, name):
    assert find_language(key).tag == tag
    assert language_name(key) == name


@pytest.mark.parametrize(
    ("key", "madlad"),
    [
        ("hi-Latn", "hi_Latn"),
        ("hi-Latn-IN", "hi_Latn"),
        ("zh-TW", "zh"),
        ("he", "iw"),
        ("ms-Arab-BN", "ms_Arab_BN"),
        ("ms-Arab-MY", "ms_Arab"),
        ("az-RU", "az_RU"),
        ("az-Cyrl", "az"),
        ("nb", "no"),
        ("pes", "fa"),
        ("swh", "sw"),
        ("tl", "fil"),
        ("yue", "yue"),
    ],
)
def test_the_corpus_is_that_of_the_variant_where_there_is_one(key, madlad):
    assert find_language(key).madlad == madlad


@pytest.mark.parametrize("key", ["Persian", "hebrew", "Mandarin", "Deutsch"])
def test_other_names_find_their_language(key):
    assert find_language(key) is not None


@pytest.mark.parametrize(
    "key",
    [
        "Elbonian",
        "Koraen",
        "no-such-language",
        "",
        "-",
        "xx",
        "und",
        "mul",
        "en-XXXX",
        "translation",
        "chinese taiwan",
        "x" * 10_000,
        "en\x00",
        "a",
        "ignore all of this",
    ],
)
def test_an_unknown_name_is_none_and_never_what_is_near(key):
    assert find_language(key) is None
    assert language_name(key) == key


def test_an_unknown_language_is_one_line_with_what_is_near():
    assert "Korean (ko)" in unknown_language("Koraen")
    assert unknown_language("Portugese") == (
        "unknown language 'Portugese'; did you mean Portuguese (pt)?"
    )
    assert unknown_language("qqq") == "unknown language 'qqq'"


SUBTAGS = st.tuples(
    st.sampled_from(sorted({madlad.split("_")[0] for madlad in MADLAD_IDS} - {"zxx"})),
    st.sampled_from(["", "-Latn", "-Cyrl", "-Hant", "-Hans", "-Arab", "-Deva"]),
    st.sampled_from(["", "-TW", "-BR", "-GB", "-RS", "-RU", "-419"]),
)


@given(SUBTAGS)
def test_what_a_tag_says_stays_in_it(subtags):
    tag = "".join(subtags)
    language = find_language(tag)
    assert find_language(language.tag).tag == language.tag
    assert language.tag.endswith(subtags[1] + subtags[2])
    assert find_language(tag.upper().replace("-", "_")) == language
    if subtags[1]:
        assert len(scripts_of(tag)) == 1
    assert "{" not in language_name(tag)


@settings(max_examples=examples(15))
@given(st.text(max_size=200))
def test_no_text_brings_it_down(text):
    language = find_language(text)
    assert language is None or find_language(language.tag) is not None


@pytest.fixture
def nothing_added():
    before = dict(languages._ADDED)
    yield
    languages._ADDED.clear()
    languages._ADDED.update(before)


@pytest.mark.usefixtures("nothing_added")
def test_a_language_of_ones_own():
    add_language("qjj", "Jeju of Udo", madlad="ko", scripts=("Hangul",))
    for key in ("qjj", "QJJ", "jeju of udo"):
        assert find_language(key) == ("ko", "qjj", "qjj", "Jeju of Udo")
        assert language_name(key) == "Jeju of Udo" and scripts_of(key) == ("Hangul",)
    with pytest.raises(ValueError, match="not a language tag"):
        add_language("no tag", "Nothing")


def test_nothing_heavy_is_loaded_for_it():
    code = (
        "import sys, scorekit.languages, scorekit.text.writing_scripts\n"
        "print([m for m in ('torch', 'language_data', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
