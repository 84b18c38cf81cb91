"""One table for all the names of a language."""

from __future__ import annotations

import pytest

from scorekit.languages import LANGUAGES, find_language


@pytest.mark.parametrize("key", ["ko", "kor", "ko-KR", "Korean", "KOREAN", "ko_KR", " ko "])
def test_every_name_finds_korean(key):
    assert find_language(key) == ("ko", "kor", "ko-KR", "Korean")


@pytest.mark.parametrize(
    ("key", "name"), [("en-GB", "English"), ("he", "Hebrew"), ("pt-PT", "Portuguese")]
)
def test_other_regions_and_aliases_find_their_language(key, name):
    assert find_language(key).name == name


def test_an_unknown_name_is_none():
    for name in ("Klingon", "no-such-language", "", "-"):
        assert find_language(name) is None


def test_no_key_stands_for_two_languages():
    keys = [key.lower() for language in LANGUAGES for key in set(map(str.lower, language))]
    assert len(keys) == len(set(keys))
