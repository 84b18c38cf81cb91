"""Check the shared rules, which have a profile of thresholds for each caller."""

from __future__ import annotations

import dataclasses

import pytest

from scorekit.text import rules
from scorekit.text.rules import GUARDS, JUDGE, SOURCES, SYNTHESIS, Pair, Thresholds
from services.judge.rules import judge_translation
from synth.filters import RuleConfig, check_rules

SRC = "Please save all of your changes before you close the window, or they will be lost."
MT = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
RULES = (
    rules.copied,
    rules.source_kept,
    rules.wrong_script,
    rules.wrong_variant,
    rules.source_language,
    rules.third_language,
    rules.repetition,
    rules.length_ratio,
)


def test_the_defaults_of_synthesis_are_its_profile() -> None:
    assert RuleConfig().thresholds() == SYNTHESIS


def test_each_key_of_synthesis_reaches_a_threshold() -> None:
    changed = {
        "min_letters": 7,
        "max_copied_share": 0.11,
        "min_script_share": 0.12,
        "max_other_variant": 0.13,
        "language_confidence": 0.14,
        "min_language_chars": 6,
        "language_margin": 15.0,
        "short_language_margin": 2.5,
        "max_repetition": 0.16,
        "length_slack": 17.0,
        "length_floor": 18,
    }
    thresholds = RuleConfig.model_validate(changed).thresholds()
    fixed = {30}  # number of letters from which shares are meaningful
    assert set(dataclasses.asdict(thresholds).values()) - fixed == set(changed.values())


@pytest.mark.parametrize("thresholds", [JUDGE, SYNTHESIS, GUARDS, SOURCES])
def test_a_good_translation_breaks_no_rule_of_any_profile(thresholds: Thresholds) -> None:
    assert [rule(Pair(SRC, MT, "en", "ko"), thresholds) for rule in RULES] == [None] * len(RULES)


def test_what_a_profile_leaves_out_is_never_broken() -> None:
    worst = [Pair(SRC, SRC, "en", "ko"), Pair(SRC, MT * 20, "ko", "en"), Pair("", MT, "en", "zh")]
    silent = Thresholds()
    assert [rule(pair, silent) for pair in worst for rule in RULES if rule(pair, silent)] == []


def test_judge_and_synthesis_measure_alike_and_part_at_their_thresholds() -> None:
    """Check a text with a third of Korean letters: the judge accepts it, synthesis does not."""
    mixed = Pair(
        "Alles muss gespeichert sein.", "모두저장해야합 " + "xyzwqrvb" + " abcde", "de", "ko"
    )
    share = rules.wrong_script(mixed, SYNTHESIS)
    assert share is None  # too few letters to decide
    long = dataclasses.replace(mixed, mt=" ".join([mixed.mt] * 2))
    share = rules.wrong_script(long, SYNTHESIS)
    assert share is not None and JUDGE.min_script_share < share < SYNTHESIS.min_script_share
    assert rules.wrong_script(long, JUDGE) is None
    assert "wrong_script" in check_rules(long, RuleConfig()).failed


def test_the_judge_takes_nine_tenths_for_copied() -> None:
    source_text = "abcdefghijklmnopqr"  # 18 of 20 letters
    outcome = judge_translation(
        {
            "source_lang": "en",
            "target_lang": "de",
            "source_text": source_text,
            "candidate": f"{source_text}yz",
        }
    )
    assert isinstance(outcome, dict) and outcome["verdict"]["reason_code"] == "copied"


def test_variants_of_a_language_are_one_language() -> None:
    for pair in (("en-US", "en-GB"), ("ko", "kor"), ("zh-TW", "cmn"), ("x-own", "x-own-b")):
        assert rules.same_language(Pair("", "", *pair))
    assert not rules.same_language(Pair("", "", "en", "de"))


def test_the_judge_rejects_only_what_is_certain_of_scripts_and_debris() -> None:
    def code(src: str, mt: str, source_lang: str = "en", target_lang: str = "ko") -> str:
        texts = {"source_lang": source_lang, "target_lang": target_lang}
        verdict = judge_translation(texts | {"source_text": src, "candidate": mt})
        assert isinstance(verdict, dict)
        return str(verdict["verdict"]["reason_code"])

    assert code(SRC, MT.replace("내용", "内容")) == "third_script"
    assert code(SRC, MT + "\\n") == "debris"
    assert code("Filial piety (xiao) is a virtue.", "효(孝)는 미덕이다.") == "ok"
    assert code("内容保存", "内容을 저장하세요, 지금 바로 여기에서", "zh") == "ok"
