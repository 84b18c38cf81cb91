"""Check what broken programs leave in a translation, and what only looks like it."""

from __future__ import annotations

import pytest

from scorekit.text.findings import Certainty, debris

CERTAIN, LIKELY, POSSIBLE = Certainty.CERTAIN, Certainty.LIKELY, Certainty.POSSIBLE


def certainty(mt, src="The library opens at nine.", target="ko"):
    finding = debris(src, mt, target)
    return finding and finding.certainty


@pytest.mark.parametrize(
    ("mt", "target"),
    [
        ("도서관은 9시에 문을 엽니\ufffd.", "ko"),
        ("The caf\ufffd opens.", "en"),
        ("도서관은\x07 연다", "ko"),
        ("도서관은 \ue123 연다", "ko"),
        ("Die BÃ¼cherei Ã¶ffnet um neun.", "de"),
        ("The libraryâ€™s door", "en"),
        ("도서관은 열어요".encode().decode("latin-1"), "ko"),
        ("图书馆九点开门".encode().decode("cp1252", "ignore"), "zh"),
        ("占쏙옙 도서관", "ko"),
        ("锟斤拷图书馆", "zh"),
        ("소금 &amp; 후추", "ko"),
        ("Salt &#39;n&#39; pepper", "en"),
        ("도서관은 9시에 엽니다.\\n", "ko"),
        ("The library opens.\\n\\n", "en"),
        ("The caf\\u00e9 opens.", "en"),
        ("조용히 해 주세요ㅏ.", "ko"),
        ("도서ㄱ관은 연다", "ko"),
    ],
)
def test_lost_characters_escapes_and_loose_letters_are_certain(mt, target):
    assert certainty(mt, target=target) is CERTAIN


@pytest.mark.parametrize(
    ("src", "mt", "expected"),
    [
        ("We will contact you.", "연락드리겠습니다ㅎ.", LIKELY),
        ("We will contact you.", "연락드리겠습니다 ㅋㅋㅋ", LIKELY),
        ("lol that's hilarious", "ㅋㅋㅋ 진짜 웃기다", None),
        ("I'm so sad 😭", "너무 슬퍼ㅠㅠ", None),
        ("No way!!", "안돼ㅐㅐ", POSSIBLE),
        ("The valve is L-shaped.", "밸브는 ㄱ자 모양이다.", None),
        ("The vowel is short.", "모음 'ㅏ'는 짧다.", None),
        ("Click here.", "여기를\u200b 누르세요", LIKELY),
        ("<b>A & B</b>", "<b>A &amp; B</b>", LIKELY),
        ("Line one", "첫째 줄\\n둘째 줄", LIKELY),
    ],
)
def test_what_a_chat_or_markup_may_have_is_a_doubt_or_right(src, mt, expected):
    assert certainty(mt, src) is expected


@pytest.mark.parametrize(
    ("src", "mt", "target"),
    [
        ("Use \\n for a line break.", "줄바꿈에는 \\n을 쓰세요: \\n", "ko"),
        ("Write &amp; for &.", "&에는 &amp;를 쓰세요.", "ko"),
        ("It shows \ufffd.", "\ufffd가 보인다.", "ko"),
        ("The Q&A is at noon.", "Q&A는 정오에 시작합니다.", "ko"),
        ("Sounds like fun", "Das macht „Spaß“ und heißt „Ä“.", "de"),
        ("Say it", "Il a dit « café ».", "fr"),
        ("NO", "NÃO É SÓ ISSO", "pt"),
        ("Family 👨‍👩‍👧 ❤️", "가족 👨‍👩‍👧 ❤️", "ko"),
        ("Escape it with code", "`a&amp;b\\n` 로 쓴다", "ko"),
        ("Book", "کتاب\u200cها", "fa"),
        ("Ship", "Donau\u00addampfschiff", "de"),
        ("ㄱ and ㅏ", "도ㄱ", "ko"),
    ],
)
def test_what_the_source_has_and_what_writing_needs_is_right(src, mt, target):
    assert certainty(mt, src, target) is None
