"""Check of a translation's language for gemmax."""

from __future__ import annotations

import pytest

from scorekit.adapters.gemmax import LanguageItem, language_check, target_language
from scorekit.errors import SampleError
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.results import GateResult
from scorekit.rewards.rules import load_gate

SRC = "Yesterday evening we walked along the river for a long time."
KOREAN = "어제 저녁에 우리는 강가를 따라 오래 걸었고, 돌아오는 길에 따뜻한 국수를 먹었다."
GERMAN = "Gestern Abend gingen wir lange am Fluss entlang und aßen auf dem Heimweg warme Nudeln."
#: Translation, name of the language -> la_ok, la_skip, pred_iso, tgt_iso.
CASES = {
    "right": (KOREAN, "Korean", 1, 0, "kor_Kore", "kor_Kore"),
    "wrong": (GERMAN, "Korean", 0, 0, "", "kor_Kore"),
    "short": ("Hallo.", "Korean", 1, 1, "", "kor_Kore"),
    "blank": (" \n", "Korean", 0, 0, "", "kor_Kore"),
    "unknown": (GERMAN, "Elvish", 1, 1, "", ""),
    "unnamed": (GERMAN, None, 1, 1, "", ""),
    "not in the model": (GERMAN, "Cantonese", 1, 1, "", "yue_Hant"),
}


@pytest.fixture(scope="module")
def rule():
    return load_gate("language", LanguageGate(rule="language", unknown="pass"))


@pytest.mark.parametrize("case", CASES)
def test_a_translation_in_another_language_is_the_only_one_that_fails(rule, case):
    mt, name, ok, skip, predicted, target = CASES[case]
    fields = language_check(LanguageItem(src=SRC, mt=mt, tgt_lang=name), rule)
    language = {"la_ok": ok, "la_skip": skip, "pred_iso": predicted, "tgt_iso": target}
    assert fields == language | {"wa": 0.0, "wa_precision": 0.0, "wa_recall": 0.0}


def test_a_check_that_fails_is_no_answer():
    def broken(sample):
        return GateResult("unknown", message="no model")

    with pytest.raises(SampleError, match="no model"):
        language_check(LanguageItem(src=SRC, mt=KOREAN, tgt_lang="Korean"), broken)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Korean", "ko-KR"),
        (" Tagalog ", "fil-PH"),
        ("Persian", "fa-IR"),
        ("Chinese (Simplified)", "zh-Hans"),
        ("Chinese (Traditional)", "zh-Hant"),
        ("Portuguese (Brazil)", "pt-BR"),
    ],
)
def test_languages_have_english_names_with_a_variant_in_parentheses(name, tag):
    assert target_language(name).language.tag == tag


@pytest.mark.parametrize("name", [None, "", "(", "()", "Elvish (High)", "x" * 1000, "\0"])
def test_other_names_are_unknown(name):
    assert target_language(name) is None
