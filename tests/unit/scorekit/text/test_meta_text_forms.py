"""Check the forms of text that chat models add around a translation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scorekit.text.checks import added_quotes, marker, repetition
from scorekit.text.meta_text import added_note, meta_phrase, refusal

ROOT = Path(__file__).parents[4]
EN = "The weather was so fine that we walked along the river until the evening."
KO = "날씨가 너무 좋아서 우리는 저녁까지 강을 따라 걸었다."
ZH = "天气非常好，我们沿着河一直走到了晚上。"
JA = "天気がとても良かったので、私たちは夕方まで川沿いを歩きました。"
DE = "Das Wetter war so schön, dass wir bis zum Abend am Fluss entlang gegangen sind."
FORMS = [
    f"번역은 다음과 같습니다: {KO}",
    f"한국어로 번역하면 다음과 같습니다: {KO}",
    f"물론입니다! 요청하신 번역은 다음과 같습니다: {KO}",
    f"[번역] {KO}",
    f"한국어: {KO}",
    f"Output: {KO}",
    f"The English translation is: {KO}",
    f"네, 알겠습니다. {KO}",
    f"{KO} 도움이 되셨길 바랍니다!",
    f"{KO} 혹시 더 필요한 번역이 있으면 말씀해 주세요.",
    f"{KO} (직역: 저녁까지 강을 따라 걸었다)",
    f'{{"translation": "{KO}"}}',
    f"> {KO}",
    f"{KO} / {KO[:-1]}다.",
    f"{KO} 또는 {KO}",
    f"{KO}\n{KO}",
    f"{KO} {KO} {KO}",
    f"{KO}{KO}\n{KO} ",
]


def _found(src, mt):
    checks = (meta_phrase, refusal, added_note, added_quotes, marker)
    return [check for check in checks if check(src, mt)] or repetition(src, mt) > 0.3


@pytest.mark.parametrize("mt", FORMS)
def test_what_a_chat_model_adds_is_found_unless_the_source_has_it(mt):
    assert _found(EN, mt)
    assert not _found(mt, mt)


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("The translation is as follows: a house", "번역은 다음과 같습니다: 집"),
        ("Output: three files", "출력: 파일 세 개"),
        ("Result: 3:1", "결과: 3:1"),
        ("Korean: https://example.org/ko", "한국어: https://example.org/ko"),
        ("The rules are: no noise.", "규칙은 다음과 같습니다: 소음 금지."),
        ("They are the following: one and two.", "다음과 같습니다: 하나와 둘."),
        ("Yes. It rained.", "네. 비가 왔어요."),
        ("Of course! He came.", "물론입니다! 그가 왔습니다."),
        ("Sure, we went. It rained.", "Klar, wir gingen hin. Es regnete."),
        ("It rained. I hope this helps you.", "비가 왔다. 도움이 되셨길 바랍니다."),
        ('{"text": "house"}', '{"text": "집"}'),
        ("> A quoted line", "> 인용한 줄"),
        ("He came. Or he went.", "그는 왔다. 또는 갔다."),
        ("One.\nTwo.", "하나.\n둘."),
        ("A.\nB.\n\nC.", "가.\n나.\n\n다."),
        ("This file converts names.", "This file translates names."),
        ("It is called 'house' (literally: a home).", "그것은 '집'(직역: 가정)이라고 한다."),
    ],
)
def test_a_source_that_speaks_so_may_be_translated_so(src, mt):
    assert not _found(src, mt)
