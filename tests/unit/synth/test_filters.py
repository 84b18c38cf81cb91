"""Check which real texts in several scripts each rule of format_filter accepts and rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scorekit.text.rules import Pair
from synth.filters import RULES, RuleConfig, abstentions, check_rules
from synth.reasons import RuleCode
from tests.kits.examples import examples

ROOT = Path(__file__).parents[3]
TAGS = {
    "en": "en-US",
    "ko": "ko-KR",
    "zh": "zh-CN",
    "ja": "ja-JP",
    "th": "th-TH",
    "de": "de-DE",
    "ru": "ru-RU",
    "ar": "ar-EG",
    "es": "es-MX",
}
EN = "The committee published its report on the safety of the new bridge in March 2019."
KO = "위원회는 2019년 3월에 새 다리의 안전에 관한 보고서를 발표했다."
#: Correct translations of EN, which every rule must accept.
TRUE = {
    "ko": KO,
    "zh": "委员会于2019年3月发布了关于新桥安全性的报告。",
    "ja": "委員会は2019年3月に新しい橋の安全性に関する報告書を発表した。",
    "th": "คณะกรรมการได้เผยแพร่รายงานเกี่ยวกับความปลอดภัยของสะพานใหม่ในเดือนมีนาคม 2019",
    "de": "Der Ausschuss veröffentlichte im März 2019 seinen Bericht über die Sicherheit der neuen "
    "Brücke.",
    "ru": "Комитет опубликовал свой доклад о безопасности нового моста в марте 2019 года.",
    "ar": "نشرت اللجنة تقريرها عن سلامة الجسر الجديد في مارس ٢٠١٩.",
    "es": "El comité publicó su informe sobre la seguridad del nuevo puente en marzo de 2019.",
}
#: The same in Traditional Chinese, and in Serbian's two scripts.
TRAD = "委員會於2019年3月發布了關於新橋安全性的報告。"
LATN = "Odbor je u martu 2019. godine objavio svoj izveštaj o bezbednosti novog mosta."
CYRL = "Одбор је у марту 2019. године објавио свој извештај о безбедности новог моста."


def failed(mt, src=EN, languages="en-ko", **rules):
    source, target = (TAGS.get(code, code) for code in languages.split("-", 1))
    return list(check_rules(Pair(src, mt, source, target), RuleConfig(**rules)).failed)


@pytest.mark.parametrize("code", TRUE)
def test_true_translations_pass_every_rule_both_ways(code):
    assert failed(TRUE[code], languages=f"en-{code}") == []
    assert failed(EN, src=TRUE[code], languages=f"{code}-en") == []


CASES: list[tuple[str, str, dict]] = [
    ("empty", "", {}),
    ("empty", " \n\u3000", {}),
    ("too_short", "네", {}),
    ("too_long", "보고서를 발표했다. " * 1200, {}),
    ("length_ratio", "발표했다.", {}),
    ("length_ratio", KO + " 그리고 아주 많은 다른 이야기를 길게 덧붙였다." * 8, {}),
    ("meta_phrase", f"번역: {KO}", {}),
    ("meta_phrase", f"다음은 번역문입니다:\n{KO}", {}),
    ("meta_phrase", f"Here is the translation:\n{KO}", {}),
    ("meta_phrase", f"I will translate this text. {KO}", {}),
    ("meta_phrase", f"翻译如下：\n{TRUE['zh']}", {"languages": "en-zh"}),
    ("meta_phrase", f"以下は翻訳です：\n{TRUE['ja']}", {"languages": "en-ja"}),
    ("meta_phrase", f"Hier ist die Übersetzung:\n{TRUE['de']}", {"languages": "en-de"}),
    ("refusal", "죄송합니다만, 이 요청은 처리할 수 없습니다.", {}),
    ("refusal", "很抱歉，我无法翻译这段内容。", {"languages": "en-zh"}),
    ("refusal", "Es tut mir leid, aber dabei kann ich nicht helfen.", {"languages": "en-de"}),
    ("added_note", f"{KO}\n\n(참고: 원문의 어조를 살렸습니다.)", {}),
    ("added_note", f"{TRUE['zh']}\n注：意译。", {"languages": "en-zh"}),
    ("added_note", f"{KO}\n\nLet me know if you need changes.", {}),
    ("added_quotes", f'"{KO}"', {}),
    ("added_quotes", f"„{TRUE['de']}“", {"languages": "en-de"}),
    ("role_token", f"{KO} assistant: 네", {}),
    ("role_token", f"### Response:\n{KO}", {}),
    ("role_token", f"assistant: {KO}", {}),
    ("role_token", f"{KO}\nuser: 감사합니다", {}),
    ("role_token", f"{KO}<|im_end|>", {}),
    ("tag", f"<think>다리 이야기다.</think>{KO}", {}),
    ("tag", f"```\n{KO}\n```", {}),
    ("tag", f"<b>{KO}</b>", {}),
    ("copied_source", EN, {}),
    ("copied_source", f"{KO}\n{EN}", {}),
    ("copied_source", EN.replace("March", "März"), {"languages": "en-de"}),
    ("wrong_script", TRUE["zh"] + "该报告的内容随后在新闻发布会上得到了详细的说明。", {}),
    ("wrong_script", TRUE["ru"], {"languages": "en-ar"}),
    ("wrong_script", "위원회는 새 다리의 report on the safety of the new bridge in 2019.", {}),
    ("wrong_variant", TRUE["zh"], {"languages": "en-zh-TW"}),
    ("wrong_variant", TRAD, {"languages": "en-zh"}),
    (
        "wrong_language",
        "The panel brought out what it had found about how safe people are on the "
        "bridge, in March 2019.",
        {"languages": "en-de"},
    ),
    ("wrong_language", EN, {"src": KO, "languages": "ko-de"}),
    ("wrong_language", TRUE["de"], {"src": KO, "languages": "ko-en"}),
    ("wrong_language", TRUE["ja"] * 2, {"languages": "en-zh"}),
    ("repetition", "보고서를 발표했다. " * 9, {}),
    ("truncated", "위원회는 2019년 3월에 새 다리의 안전에 관한 보고서(제3권을 발표했다.", {}),
    ("truncated", KO.removesuffix("."), {"require_end_mark": True}),
    ("numbers_missing", "위원회는 봄에 새 다리의 안전에 관한 보고서를 발표했다.", {}),
    ("placeholders", "파일을 찾을 수 없습니다.", {"src": "The file {name} was not found here."}),
    (
        "placeholders",
        "{name} 파일 {name}을(를) 찾을 수 없습니다.",
        {"src": "The file {name} was not found here."},
    ),
    ("third_script", KO.replace("안전", "安全"), {}),
    ("third_script", EN.replace("report", "отчёт"), {"src": KO, "languages": "ko-en"}),
    ("debris", KO.replace("다.", "\ufffd."), {}),
    ("debris", KO + "\\n", {}),
    ("debris", KO.replace("새 다리", "새 &amp; 다리"), {}),
    ("lost_emoji", KO + " 💔", {"src": EN + " ❤️"}),
]


@pytest.mark.parametrize(("code", "mt", "more"), CASES)
def test_each_rule_names_what_it_is_for(code, mt, more):
    assert code in failed(mt, **more)
    assert code not in failed(mt, off=[code], **more)


def test_every_code_has_a_case_and_a_rule():
    assert {code for code, *_ in CASES} == set(RULES) == set(RuleCode)


@pytest.mark.parametrize(
    ("mt", "tag", "codes"),
    [
        (TRAD, "zh-TW", []),
        (TRAD, "zh-Hant", []),
        (TRAD, "zh-HK", []),
        (TRAD, "yue-HK", []),
        (TRUE["zh"], "zh-Hans", []),
        (TRUE["zh"], "zh-SG", []),
        (TRAD, "zh-Hans", ["wrong_variant"]),
        (TRUE["zh"], "zh-HK", ["wrong_variant"]),
        (LATN, "sr-Latn", []),
        (CYRL, "sr-Cyrl", []),
        (LATN, "sr-RS", []),
        (CYRL, "sr-RS", []),
        (LATN, "sr-Cyrl", ["wrong_script"]),
        (CYRL, "sr-Latn", ["wrong_script"]),
        ("Samiti ne March 2019 mein naye pul ki suraksha par apni report jaari ki.", "hi-Latn", []),
        (
            "समिति ने मार्च 2019 में नए पुल की सुरक्षा पर अपनी विस्तृत रिपोर्ट प्रकाशित की।",
            "hi-Latn",
            ["wrong_script"],
        ),
        (
            "Komitə 2019-cu ilin martında yeni körpünün təhlükəsizliyinə dair hesabatını "
            "dərc etdi.",
            "az-Cyrl",
            ["wrong_script"],
        ),
        (
            "Комитə 2019-ҹу илин мартында јени көрпүнүн тəһлүкəсизлијинə даир һесабатыны "
            "дəрҹ етди.",
            "az-Cyrl",
            [],
        ),
    ],
)
def test_the_variant_of_the_tag_is_the_one_that_passes(mt, tag, codes):
    assert list(check_rules(Pair(EN, mt, "en-US", tag), RuleConfig()).failed)[:1] == codes


def test_one_character_of_the_other_variant_in_a_longer_text_passes():
    assert failed(TRAD.replace("關", "关"), languages="en-zh-TW") == []
    assert failed(TRAD.replace("關", "关"), languages="en-zh-TW", max_other_variant=0.0) == [
        "wrong_variant"
    ]
    assert failed(TRUE["zh"] + TRAD, languages="en-zh-TW") == ["wrong_variant"]


def test_what_the_source_has_the_translation_may_have_too():
    assert failed(f"번역: {KO}", src=f"Translation: {EN}") == []
    assert failed(f"<b>{KO}</b>", src=f"<b>{EN}</b>") == []
    assert failed(f"user: {KO}", src=f"user: {EN}") == []
    assert failed("네 네 네 네 네 네 네", src="No no no no no no no") == []


def test_korean_that_speaks_of_translating_is_no_meta_phrase():
    src = "The next sentence to be translated is on the screen."
    assert failed("다음은 번역할 문장이 화면에 나온다.", src=src) == []


def test_names_links_and_code_that_stay_are_no_copy():
    src = "Open https://example.org/download/installer-3.2.tar.gz and run `make install` there."
    mt = "https://example.org/download/installer-3.2.tar.gz 를 열고 `make install`을 실행하세요."
    assert failed(mt, src=src) == []
    assert failed("PowerLink OpenTherm", src="PowerLink OpenTherm") == []
    assert failed("Bluetooth", src="Bluetooth") == []
    assert failed("Administrator", src="Administrator", languages="en-de") == []
    assert failed("UniFi Protect 설정", src="UniFi Protect settings") == []
    copy = "Home Assistant"  # a name, or two untranslated words
    assert "copied_source" in failed(copy, src=copy)
    assert failed(copy, src=copy, min_letters=30) == []
    assert failed(copy, src=copy, min_language_chars=15) == []


NAMES = [
    ("New York Times", "en-ko"),
    ("New York Times", "en-de"),
    ("Albert Einstein", "en-zh"),
    ("Microsoft Office 365", "en-ko"),
    ("Visual Studio Code iPhone Edition", "en-zh"),
    ("1. FC Köln", "de-en"),
    ("Oktoberfest", "de-en"),
]


@pytest.mark.parametrize(("name", "languages"), NAMES)
def test_a_copied_name_is_a_doubt_which_a_judge_decides(name, languages):
    assert "copied_source" in failed(name, src=name, languages=languages)
    source, target = (TAGS[code] for code in languages.split("-"))
    for mt in (name, f" {name.upper()}"):
        verdict = check_rules(Pair(name, mt, source, target), RuleConfig(), has_judge=True)
        assert verdict.failed == {}
        if mt == name:
            assert "copied_source" in verdict.doubtful
    if target in ("ko-KR", "zh-CN"):
        assert "wrong_script" in verdict.doubtful


BOSS = "The 부장님 is in the large meeting room on the 3rd floor."
DOUBTS = [
    (
        "third_script",
        BOSS,
        "부장님은 지금 3층에 있는 큰 회의실에 계세요.",
        "ko-en",
        True,
    ),
    (
        "third_script",
        "효(孝)는 유교의 핵심 덕목이다.",
        "Filial piety is a core virtue.",
        "en-ko",
        False,
    ),
    (
        "debris",
        "이틀 이내에 연락드리겠습니다ㅎ.",
        "We will contact you in two days.",
        "en-ko",
        True,
    ),
    ("lost_emoji", "와, 너 진짜 천재다", "Wow, you are such a genius 🙄", "en-ko", False),
]


@pytest.mark.parametrize(("code", "mt", "src", "languages", "is_strong"), DOUBTS)
def test_a_doubt_goes_to_the_judge_and_a_strong_one_is_rejected_without(
    code, mt, src, languages, is_strong
):
    source, target = (TAGS[language] for language in languages.split("-"))
    verdict = check_rules(Pair(src, mt, source, target), RuleConfig(), has_judge=True)
    assert verdict.failed == {} and code in verdict.doubtful
    assert failed(mt, src=src, languages=languages) == ([code] if is_strong else [])


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("Delete this file", "Delete this file"),
        ("delete all files", "Delete All Files"),
        ("Restarting Now?", "Restarting Now?"),
        ("One Two Three Four Five Six Seven", "One Two Three Four Five Six Seven"),
        ("New York Times", "New York Times Magazine"),
    ],
)
def test_a_copy_that_is_no_name_is_rejected_with_a_judge_too(src, mt):
    verdict = check_rules(Pair(src, mt, "en-US", "ko-KR"), RuleConfig(), has_judge=True)
    assert {"copied_source", "wrong_script"} & set(verdict.failed)


def test_a_rule_that_has_no_table_for_a_language_says_so():
    assert abstentions("ko-KR", "en-US") == abstentions("en-US", "zh-TW") == []
    assert [line.split(" ")[0] for line in abstentions("en-US", "fr-FR")] == [
        "wrong_language:",
        "numbers_missing",
    ]
    assert failed("Ouvrir la porte", src="Open the door", languages="en-es") == []


def test_spelled_out_numbers_may_become_digits_but_not_the_reverse_in_bulk():
    src = "Three people arrived within twenty minutes."
    assert failed("세 명이 아니라 3명이 20분 안에 도착했다.", src=src) == []
    src = "Pages 12, 48 and 96 are missing."
    assert failed("12쪽과 48쪽 등이 빠져 있다.", src=src) == ["numbers_missing"]
    assert failed("12쪽과 48쪽 등이 빠져 있다.", src=src, max_missing_numbers=0.4) == []
    assert failed("여러 쪽이 빠져 있다. 12쪽 등이다.", src=src, max_missing_numbers=0.4) == [
        "numbers_missing"
    ]


def test_numbers_are_not_asked_for_where_a_language_has_no_table_of_them():
    src = "Pages 12, 48 and 96 are missing from it."
    assert failed("В книге не хватает трёх страниц.", src=src, languages="en-ru") == []


THRESHOLDS = [
    ({"min_chars": 100}, KO, "too_short"),
    ({"max_chars": 20}, KO, "too_long"),
    ({"length_slack": 1.01}, "위원회는 2019년 3월 보고서를 냈다.", "length_ratio"),
    ({"max_copied_share": 0.01}, f"{KO} (The committee published its report)", "copied_source"),
    ({"min_script_share": 0.9}, f"{KO} (the safety of)", "wrong_script"),
    ({"max_repetition": 0.0}, KO + " 정말 정말 정말 정말", "repetition"),
    ({"max_missing_numbers": 0.0}, f"{KO} (7, 8, 9)", "numbers_missing"),
    ({"require_end_mark": True}, KO.removesuffix("."), "truncated"),
]


@pytest.mark.parametrize(("rules", "mt", "code"), THRESHOLDS)
def test_each_threshold_changes_what_passes(rules, mt, code):
    src = f"{EN} (7, 8, 9, 11)" if code == "numbers_missing" else EN
    assert code not in failed(mt, src=src)
    assert code in failed(mt, src=src, **rules)


def test_thresholds_that_let_more_through():
    copy = EN + " Mehr."
    assert "copied_source" in failed(copy, languages="en-de")
    assert "copied_source" not in failed(copy, languages="en-de", max_copied_share=1.0)
    english = "The panel brought out what it had found about the bridge, in March 2019."
    assert "wrong_language" in failed(english, languages="en-de")
    off = {"language_confidence": 1.0, "language_margin": None}
    assert "wrong_language" not in failed(english, languages="en-de", **off)
    assert failed(f"<b>{KO}</b>", allowed_tags=["b"]) == []
    assert "tag" in failed(f"<i>{KO}</i>", allowed_tags=["b"])
    assert "length_ratio" in failed(
        "위원회가 지난봄에 낸 보고서이다.", src="Report", length_floor=0
    )
    assert "length_ratio" not in failed("위원회가 지난봄에 낸 보고서이다.", src="Report")


def test_an_unknown_rule_or_key_is_refused():
    with pytest.raises(ValidationError):
        RuleConfig(off=["copied"])
    with pytest.raises(ValidationError):
        RuleConfig(min_char=3)


@settings(max_examples=examples(150))
@given(
    src=st.text(min_size=1, max_size=200),
    mt=st.text(max_size=200),
    pair=st.sampled_from(["en-ko", "ko-en", "zh-de", "en-th", "ar-ru"]),
)
def test_no_text_breaks_a_rule_and_each_rule_is_told_of_once(src, mt, pair):
    source, target = (TAGS[code] for code in pair.split("-"))
    verdict = check_rules(Pair(src, mt, source, target), RuleConfig())
    rule_names = [*verdict.passed, *verdict.failed]
    assert len(rule_names) == len(set(rule_names))
    assert set(rule_names) == set(RULES) or list(verdict.failed) == ["empty"]
    assert all(isinstance(seen, str) and seen for seen in verdict.failed.values())
    assert ("empty" in verdict.failed) == (not mt.strip())
