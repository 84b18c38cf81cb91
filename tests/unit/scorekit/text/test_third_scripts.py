"""Check which words of another script are certain mistakes, doubts, or right."""

from __future__ import annotations

import pytest

from scorekit.text.findings import Certainty, third_script

CERTAIN, LIKELY, POSSIBLE = Certainty.CERTAIN, Certainty.LIKELY, Certainty.POSSIBLE


def certainty(src, mt, languages):
    finding = third_script(src, mt, *languages.split("-"))
    return finding and finding.certainty


@pytest.mark.parametrize(
    ("src", "mt", "languages", "seen"),
    [
        ("It is very effective.", "데 非常 효과적입니다", "en-ko", "非常 (Han)"),
        ("Rain falls in the garden.", "정원에 내리는 дождь를 봐.", "en-ko", "дождь (Cyrillic)"),
        ("Das Amt kündigte es an.", "They announced new 措施", "de-en", "措施 (Han)"),
        ("The kids play.", "Die Kinder spielen im 정원.", "en-de", "정원 (Hangul)"),
        (
            "Wash your hands.",
            "식사 전에 手を洗ってください.",
            "en-ko",
            "手を洗ってください (Han, Kana)",
        ),
        ("It starts soon.", "会议 دقائق 后开始。", "en-zh", "دقائق (Arabic)"),
        ("He gave up.", "그는 끊었다. 他现在很健康。", "en-ko", "他现在很健康 (Han)"),
        ("A long walk.", "긴 ｻﾝﾎﾟ 산책.", "en-ko", "ｻﾝﾎﾟ (Kana)"),
        ("An apple.", "An аpple.", "de-en", None),
    ],
)
def test_a_word_of_a_script_that_neither_text_has_is_certain(src, mt, languages, seen):
    finding = third_script(src, mt, *languages.split("-"))
    assert finding is not None and finding.certainty is CERTAIN
    assert seen is None or finding.seen == seen


@pytest.mark.parametrize(
    ("src", "mt", "languages"),
    [
        ("부장님은 회의실에 계세요.", "The 부장님 is in the meeting room.", "ko-en"),
        ("政府宣布了新措施。", "The government announced new 措施.", "zh-en"),
        ("效果非常好。", "효과가 非常 좋다.", "zh-ko"),
        ("Слово «дом» короткое.", "'дома'라는 말은 짧다. дома", "ru-ko"),
    ],
)
def test_a_word_of_a_script_that_the_source_has_is_a_doubt(src, mt, languages):
    assert certainty(src, mt, languages) is LIKELY


@pytest.mark.parametrize(
    ("src", "mt", "languages", "expected"),
    [
        ("门上贴着一个“福”字。", "문에 '복(福)' 자가 붙어 있다.", "zh-ko", None),
        ("Filial piety is a virtue.", "효(孝)는 미덕이다.", "en-ko", POSSIBLE),
        ("It was called Joseon.", "조선(朝鮮)이라 불렸다.", "en-ko", POSSIBLE),
        ("It was called Joseon.", "It was called Joseon (朝鮮).", "de-en", LIKELY),
        ("효(孝)는 덕목이다.", "Filial piety (孝, hyo) is a virtue.", "ko-en", None),
        ("US and China meet", "美 국무장관 방중", "en-ko", LIKELY),
        ("Shrug", "글쎄 ¯\\_(ツ)_/¯", "en-ko", LIKELY),
        ("Japanese", "日本語", "en-ko", POSSIBLE),
    ],
)
def test_glosses_headlines_faces_and_names_of_languages_are_doubts_at_most(
    src, mt, languages, expected
):
    assert certainty(src, mt, languages) is expected


@pytest.mark.parametrize(
    ("src", "mt", "languages"),
    [
        (
            'In Japanese, "ありがとう" means thanks.',
            '일본어로 "ありがとう"는 고맙다는 뜻.',
            "en-ko",
        ),
        ("The angle θ is 30°.", "각 θ는 30°이다.", "en-ko"),
        ("전용면적 59㎡, 24℃, №3, ™", "Net area 59㎡, 24℃, №3, ™", "ko-en"),
        ("N.º 5, 1ª", "N.º 5, 1ª", "es-de"),
        ("☆新メニュー☆", "☆신메뉴☆ 〒 ㈜ ①", "ja-ko"),
        ("A and B", "A ㆍ B 그리고 ＡＢＣ 𝐀", "en-ko"),
        ("See 文档 there", "그곳의 `文档`을 보라: https://example.org/文档", "en-ko"),
        ("Bridge", "Мост და", "en-xx"),
        ("Bridge", "Most мост", "en-sr"),
        ("Tea", "お茶と漢字", "en-ja"),
    ],
)
def test_signs_copied_citations_code_and_own_scripts_are_no_finding(src, mt, languages):
    assert certainty(src, mt, languages) is None


def test_the_surest_finding_is_returned():
    assert certainty("Filial piety", "효(孝)는 очень 중요하다.", "en-ko") is CERTAIN
