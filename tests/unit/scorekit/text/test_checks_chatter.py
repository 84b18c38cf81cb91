"""Check that comments, chat markers and code fences before a translation are detected."""

from __future__ import annotations

import pytest

from scorekit.text.chat_marks import role_token
from scorekit.text.checks import added_quotes, marker, repetition
from scorekit.text.meta_text import added_note, meta_phrase, refusal

EN = "The weather was so fine that we walked along the river until the evening."
KO = "날씨가 너무 좋아서 우리는 저녁까지 강을 따라 걸었다."


@pytest.mark.parametrize(
    "start",
    [
        "Here is the translation:",
        "Here's the Korean translation of your text:\n",
        "Translation:",
        "Sure! Here is the translated text:",
        "**Translation:**",
        "Korean translation:",
        "The translation is as follows:",
        "I will translate this for you.",
        "As an AI model, I",
        "번역:",
        "번역문:\n",
        "한국어 번역:",
        "[번역]\n",
        "다음은 번역입니다:",
        "다음은 요청하신 텍스트의 한국어 번역입니다.\n",
        "물론입니다! 다음은 번역문입니다:",
        "아래는 번역 결과입니다.",
        "네, 번역해 드리겠습니다.",
        "翻译：",
        "以下是翻译：",
        "翻译如下：",
        "好的，以下是中文译文：\n",
        "这是翻译结果：",
        "翻訳：",
        "以下は日本語訳です：\n",
        "以下が翻訳です。",
        "日本語訳：",
        "はい、以下は翻訳です:",
        "Übersetzung:",
        "Hier ist die Übersetzung:",
        "Deutsche Übersetzung:",
        "Traduction :",
        "Voici la traduction :",
        "Traducción:",
        "Aquí está la traducción:",
        "Перевод:",
        "Вот перевод:",
        "คำแปล:",
    ],
)
def test_talk_about_the_translation_is_found_at_its_start(start):
    assert meta_phrase(EN, f"{start} {KO}")
    assert meta_phrase(EN, f"{KO}\n\n{start}") is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("The following can be translated:", "다음은 번역할 수 있는 항목입니다:"),
        ("Translation: a short history", "번역: 짧은 역사"),
        ("번역: 다음 문장을 읽으시오", "Translation: read the following sentence"),
        ("Translations are welcome.", "번역을 환영합니다."),
        ("Translator: Kim", "옮긴이: 김"),
        ("Deferred translations", "지연된 번역"),
        ("Database version", "데이터베이스 버전"),
        ("Here is the house.", "여기 집이 있다."),
        ("Translation", "번역"),
        ("I will go home.", "I will go home."),
    ],
)
def test_ordinary_text_is_no_talk_about_the_translation(src, mt):
    assert meta_phrase(src, mt) is None


@pytest.mark.parametrize(
    "text",
    [
        "assistant: 안녕",
        "안녕\nUser: 하이",
        "**System:** x",
        "안녕<|im_end|>",
        "[INST] 안녕",
        "<start_of_turn>model",
        "안녕</s>",
        "사용자: 안녕",
        "<｜end▁of▁sentence｜>",
    ],
)
def test_marks_of_a_chat_are_found_unless_the_source_has_them(text):
    assert role_token("Hello there.", text)
    assert role_token(f"x\n{text}", text) is None


def test_a_role_in_a_sentence_is_no_mark():
    assert role_token("The user said", "the user: 그 사용자가 말했다") is None
    assert role_token("Ask the system.", "시스템에 물어보세요. system") is None


def test_tags_think_marks_and_fences_are_found_unless_allowed_or_in_the_source():
    assert marker("Hi.", "<think>음</think>안녕") == "<think>"
    assert marker("Hi.", "</think>안녕") == "</think>"
    assert marker("Hi.", "- 안녕") == "-" and marker("• Hi.", "- 안녕") is None
    assert marker("Hi.", "➡\ufe0f 안녕") == "➡\ufe0f" and marker("-5", "-5") is None
    assert marker("Hi.", "안녕 😊 ") == "😊" and marker("Hi 🎉", "안녕 😊") is None
    assert marker("Hi.", "😊을 보냈다") is None
    assert marker("Hi.", "```\n안녕\n```") == "```"
    assert marker("Hi.", "<b>안녕</b>") == "<b>"
    assert marker("Hi.", "<b>안녕</b>", allowed=["b"]) is None
    assert marker("Hi.", "```안녕```", allowed=["```"]) is None
    assert marker('<a href="x">Hi</a>', '<a href="y">안녕</a>') is None
    assert marker("<b>Hi</b>", "<i>안녕</i>") == "<i>"
    assert marker("if a < b and c > d", "a < b 이고 c > d 이면") is None


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


def _matching_checks(src, mt):
    checks = (meta_phrase, refusal, added_note, added_quotes, marker)
    return [check for check in checks if check(src, mt)] or repetition(src, mt) > 0.3


@pytest.mark.parametrize("mt", FORMS)
def test_what_a_chat_model_adds_is_found_unless_the_source_has_it(mt):
    assert _matching_checks(EN, mt)
    assert not _matching_checks(mt, mt)


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
    assert not _matching_checks(src, mt)
