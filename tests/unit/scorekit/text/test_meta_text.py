"""Check that comments of chat models are detected in many languages, unlike translations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorekit.text.chat_marks import (
    CLOSES,
    OPENS,
    neutral,
    restore_marks,
    role_token,
    special_token,
    split_special_tokens,
)
from scorekit.text.checks import added_quotes
from scorekit.text.meta_text import added_note, meta_phrase, refusal

ROOT = Path(__file__).parents[4]
EN = "The weather was so fine that we walked along the river until the evening."
KO = "날씨가 너무 좋아서 우리는 저녁까지 강을 따라 걸었다."
ZH = "天气非常好，我们沿着河一直走到了晚上。"
JA = "天気がとても良かったので、私たちは夕方まで川沿いを歩きました。"
DE = "Das Wetter war so schön, dass wir bis zum Abend am Fluss entlang gegangen sind."

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I cannot assist with this request.",
    "I cannot translate this text.",
    "I'm unable to translate the provided content.",
    "I can't help with that.",
    "I am not able to fulfill this request.",
    "Sorry, I can't provide a translation of this text.",
    "I won't translate this content.",
    "I apologize, but I am unable to continue.",
    "Unfortunately, I cannot complete your request.",
    "I'm afraid I can't do that.",
    "My apologies, but I must decline.",
    "I must decline to translate this text.",
    "죄송합니다만, 이 요청은 처리할 수 없습니다.",
    "죄송하지만 해당 내용은 번역해 드릴 수 없습니다.",
    "죄송합니다. 요청하신 내용을 도와드리기 어렵습니다.",
    "이 요청은 도와드릴 수 없습니다.",
    "해당 텍스트는 정책상 번역을 제공할 수 없습니다.",
    "미안하지만 그 요청은 들어줄 수 없어요.",
    "유감스럽게도 이 요청에는 응답할 수 없습니다.",
    "很抱歉，我无法翻译这段内容。",
    "抱歉，我不能协助处理这个请求。",
    "对不起，我无法满足您的要求。",
    "我无法提供此内容的翻译。",
    "很抱歉，這個要求我無法處理。",
    "申し訳ありませんが、このリクエストにはお応えできません。",
    "申し訳ございませんが、翻訳できません。",
    "すみませんが、お手伝いできません。",
    "このご依頼にはお応えしかねます。",
    "Es tut mir leid, aber ich kann diesen Text nicht übersetzen.",
    "Entschuldigung, dabei kann ich Ihnen nicht helfen.",
    "Leider kann ich diese Anfrage nicht bearbeiten.",
    "Ich kann Ihnen dabei leider nicht helfen.",
    "Lo siento, pero no puedo ayudar con eso.",
    "No puedo traducir este texto.",
    "Je suis désolé, mais je ne peux pas traduire ce texte.",
    "Désolé, je ne peux pas vous aider.",
    "Je ne suis pas en mesure de traduire ce texte.",
    "Desculpe, mas não posso ajudar com isso.",
    "Mi dispiace, ma non posso tradurre questo testo.",
    "Извините, но я не могу помочь с этим запросом.",
    "К сожалению, я не могу перевести этот текст.",
    "Xin lỗi, tôi không thể dịch nội dung này.",
    "Maaf, saya tidak bisa membantu permintaan ini.",
    "ขออภัย ฉันไม่สามารถแปลข้อความนี้ได้",
    "عذراً، لا أستطيع ترجمة هذا النص.",
    "क्षमा करें, मैं इस अनुरोध में मदद नहीं कर सकता।",
    "Üzgünüm, bu isteğe yardımcı olamam.",
    "Przepraszam, ale nie mogę przetłumaczyć tego tekstu.",
    "I'm not comfortable translating this passage.",
    "As a language model, I am not able to produce that.",
    "I won't be translating this text, as it contains harmful material.",
    "My apologies, but translating this would go against policy.",
    "It seems the text was not provided. Please share the text you'd like me to translate.",
    "This request can't be fulfilled.",
    "There is nothing to translate.",
    "This content may violate our usage policies.",
    "I'm just an AI and can't do that.",
    "도움을 드리지 못해 죄송합니다.",
    "이 콘텐츠는 사용 정책을 위반할 수 있습니다.",
    "AI로서 그런 내용은 다룰 수 없습니다.",
    "Dabei kann ich nicht behilflich sein.",
    "由于内容政策，我不能回答这个问题。",
    "没有可翻译的内容。",
    "유감이지만 해당 텍스트의 번역은 불가능합니다.",
    "저는 이런 내용의 번역을 제공하지 않습니다.",
    "번역할 텍스트를 입력해 주세요.",
    "양해 부탁드립니다. 이 요청은 처리할 수 없습니다.",
    "부적절한 내용이 포함되어 있어 번역할 수 없습니다.",
    "Ich bin nicht in der Lage, diesen Inhalt zu übersetzen.",
    "Bitte geben Sie den zu übersetzenden Text an.",
    "Diese Anfrage kann ich nicht bearbeiten.",
    "该请求涉及敏感内容，无法翻译。",
    "请提供需要翻译的文本。",
    "作为一个语言模型，我无法翻译这段文字。",
]


@pytest.mark.parametrize("mt", REFUSALS)
def test_refusals_are_found_in_many_languages_and_words(mt):
    for src in (EN, KO, ZH, JA, DE):
        assert refusal(src, mt) or meta_phrase(src, mt), src
    assert refusal(mt, mt) is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("I'm sorry, but I can't come on Saturday.", "미안하지만 토요일에는 갈 수 없어."),
        ("미안하지만 토요일에는 갈 수 없어.", "I'm sorry, but I can't come on Saturday."),
        ("죄송하지만 그건 제가 말씀드릴 수 없어요.", "I'm sorry, but I can't tell you that."),
        ("죄송하지만 도와드릴 수 없습니다.", "Sorry, I can't help you with that."),
        ("对不起，我不能来。", "I'm sorry, but I can't come."),
        ("Es tut mir leid, ich kann nicht kommen.", "죄송하지만 저는 갈 수 없어요."),
        ("ごめん、行けない。", "I'm sorry, I can't go."),
        ("Lo siento, no puedo ir.", "죄송하지만 갈 수 없어요."),
        ("Извините, я не могу прийти.", "I'm sorry, but I cannot come."),
        (
            "I cannot help you with that, said the old man.",
            "그건 도와줄 수 없네, 하고 노인이 말했다.",
        ),
        ("나는 이 문장을 번역하지 못하겠다.", "I can't translate this sentence."),
        ("나는 웃지 않을 수 없었다.", "I can't help but laugh."),
        ("그는 아픈 아이를 돌보았다.", "I'm sorry for the child who was ill."),
        (
            "We regret that this request cannot be processed.",
            "죄송합니다만 이 요청은 처리할 수 없습니다.",
        ),
        ("This content cannot be translated.", "이 내용은 번역할 수 없습니다."),
        ("Enter the text to translate.", "번역할 텍스트를 입력해 주세요."),
        ("단위를 변환하지 않습니다.", "It does not translate the units."),
        (
            "This does not result in higher costs.",
            "Cela ne se traduit pas par des coûts plus élevés.",
        ),
        (
            "The increase means it cannot be paid.",
            "El aumento se traduce en que no se puede pagar.",
        ),
        (
            "The gear ratio cannot be changed while driving.",
            "Die Übersetzung kann während der Fahrt nicht geändert werden.",
        ),
        ("이는 매출 증가로 이어지지 않는다.", "This does not translate into higher sales."),
        (
            "Die Richtlinie ist in der Praxis nicht umsetzbar.",
            "The policy cannot be translated into practice.",
        ),
        ("The game has not been localized.", "이 게임은 번역되지 않았습니다."),
        ("The app has not been released there.", "이 앱은 번역되지 않은 채 남았다."),
        ("이 말로는 다 담을 수 없다.", "Das lässt sich nicht in Worte übersetzen."),
        ("Dieser Text verstößt gegen das Gesetz.", "This text violates the law."),
        ("Der Antrag kann nicht bearbeitet werden.", "이 요청은 처리할 수 없습니다."),
    ],
)
def test_who_says_sorry_in_the_source_may_say_it_in_the_translation(src, mt):
    assert refusal(src, mt) is None


NOTES = [
    f"{KO}\n\nNote: The word 'river' was rendered as 강.",
    f"{KO} (Note: informal style)",
    f"{KO}\n\n(참고: 원문의 어조를 살렸습니다.)",
    f"{KO}\n참고: '강'은 한강을 뜻합니다.",
    f"{KO}\n\n**참고:** 존댓말로 바꿀 수도 있습니다.",
    f"{KO}\n\n설명: 과거형을 썼습니다.",
    f"{KO} [역주: 한강]",
    f"{ZH}\n\n注：这里采用了意译。",
    f"{ZH}（注：意译）",
    f"{ZH}\n说明：此处为意译。",
    f"{JA}\n\n注：意訳しています。",
    f"{JA}（訳注：意訳）",
    f"{JA}\n補足：口語体です。",
    f"{DE}\n\nHinweis: Die Vergangenheit wurde beibehalten.",
    f"{DE}\n\nAnmerkung: wörtlich übersetzt.",
    f"{KO}\n\nExplanation: I used the past tense.",
    f"{KO}\n\n*Translator's note: informal.*",
    f"{KO}\n\nLet me know if you need any changes!",
    f"{KO} Let me know if you'd like another version.",
    f"{KO}\n\nI hope this helps!",
    f"{KO}\n\nFeel free to ask for changes.",
    f"{KO}\n\nIf you have any questions, ask.",
    f"{KO}\n\n추가로 궁금한 점이 있으시면 말씀해 주세요.",
    f"{KO}\n\n도움이 되었기를 바랍니다.",
    f"{KO}\n\n다른 질문이 있으시면 알려 주세요.",
    f"{ZH}\n\n希望这对您有帮助！",
    f"{ZH}\n\n如果您有其他问题，请告诉我。",
    f"{JA}\n\nお役に立てれば幸いです。",
    f"{DE}\n\nLassen Sie mich wissen, ob das passt.",
    f"{KO}\n\nThis translation keeps the informal tone.",
    f"{KO}\n\n위 번역은 원문의 어조를 살렸습니다.",
    f"{ZH}\n\n以上是翻译结果。",
    f"{JA}\n\n以上が翻訳です。",
    f"{DE}\n\nDiese Übersetzung ist wörtlich.",
    "Il faisait beau.\n\nRemarque : traduction libre.",
    "Hacía buen tiempo.\n\nNota: traducción libre.",
    "Было тепло.\n\nПримечание: вольный перевод.",
    f"{KO}\n\nAlternative translation: 날이 좋았다.",
    f"{KO}\n\n- Note: 강 = river",
    f"{KO}\n\n*Note that this is a literal translation.*",
    f"{KO}\n\n※ 번역 참고 사항: 존댓말을 사용했습니다.",
    f"{KO} (참고로 이 번역은 의역입니다.)",
    f"{KO}\n\n다른 번역: 날이 좋았다.",
    f"{DE}\n\nAnm. d. Übers.: wörtlich.",
]


@pytest.mark.parametrize("mt", NOTES)
def test_what_is_added_behind_a_translation_is_found(mt):
    assert added_note(EN, mt)
    assert added_note(mt, mt) is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("It is red.\nNote: blue is better.", "빨갛다.\n참고: 파란색이 낫다."),
        ("빨갛다. (참고: 파란색이 낫다.)", "It is red. (Note: blue is better.)"),
        ("It is red. Notice that blue is better.", "빨갛다. 참고: 파란색이 낫다."),
        ("Hinweis: Nur für Erwachsene.", "참고: 성인 전용입니다."),
        ("It works. Let me know if you need help.", "잘 됩니다. 도움이 필요하시면 알려 주세요."),
        (
            "잘 됩니다. 궁금한 점이 있으면 연락 주세요.",
            "It works. Let me know if you have questions.",
        ),
        ("He took note. It was cold.", "그는 적어 두었다. 추웠다."),
        ("He is a man of note.", "그는 저명한 사람이다."),
        ("Ingredients: two eggs. Description: a cake.", "재료: 달걀 두 개. 설명: 케이크."),
        ("The translation keeps the rhythm. It is fine.", "이것은 좋다. 이 번역은 운율을 살린다."),
    ],
)
def test_a_note_of_the_source_may_be_translated(src, mt):
    assert added_note(src, mt) is None


@pytest.mark.parametrize(
    "mt",
    [
        f'"{KO}"',
        f"“{KO}”",
        f"‘{KO}’",
        f"「{JA}」",
        f"『{JA}』",
        f"“{ZH}”",
        f"„{DE}“",
        f"»{DE}«",
        f"« {DE} »",
        f'"{KO[:-1]}".',
        f'\n"{KO}"\n',
        f"＂{ZH}＂",
        f"`{KO}`",
        f"**{ZH}**",
        f"*{DE}*",
    ],
)
def test_quotation_marks_around_the_whole_are_found_where_the_source_has_none(mt):
    assert added_quotes(EN, mt)
    assert added_quotes(mt, mt) is None
    assert added_quotes(f'"{EN}"', mt) is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        (EN, KO),
        (EN, f"{KO} “강”"),
        ("He and she said yes.", "“그”와 “그녀”가 그렇다고 했다. “네”"),
        ("— Я не знаю.", "“모르겠어요.”"),
        ("- No lo sé.", "“모르겠어요.”"),
        ("*Der Spiegel*", "“슈피겔”"),
        ("Tom's dog isn't the boys'", "'톰의 개'"),
        ("", '"아"'),
        ("x", '""'),
        ("He asked: why?", "그가 물었다. “왜?”"),
        (EN, f"**{KO[:5]}**{KO[5:-1]} **강**"),
    ],
)
def test_other_quotation_marks_are_no_fault(src, mt):
    assert added_quotes(src, mt) is None


@pytest.mark.parametrize(
    "mt",
    [
        f"{KO} assistant: 다음",
        f"{KO}assistant: 다음",
        f"{KO} user: 감사합니다",
        f"{KO} Assistant : 네",
        f"{KO} 사용자: 고마워요",
        f"{ZH} 助手：好的",
        f"### Response:\n{KO}",
        f"{KO}\n### Instruction:\n다음",
        f"## 번역\n{KO}",
        f"{KO} ### Input: x",
        f"{DE} ### Antwort: ja",
        f"{JA}\nユーザー：はい",
        f"{KO[:-1]}assistant: 다음",
        f"{ZH[:-1]}user: 好",
        f"{KO} **Assistant**: 네",
        f"{KO}[ASSISTANT] 네",
        f"{KO}<turn|>",
        f"{KO}<|turn>",
    ],
)
def test_turns_of_a_chat_are_found_in_mid_line_and_as_headings(mt):
    assert role_token(EN, mt)
    assert role_token(mt, mt) is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("User: hello", "사용자: 안녕"),
        ("사용자: 안녕", "User: hello"),
        ("Ask the user: yes or no", "사용자: 예 또는 아니요"),
        ("用户：你好", "user: hello"),
        ("조교: 자리에 앉으세요.", "Assistant: please sit down."),
        ("## Antwort", "## 답변"),
        ("The solar system: a guide", "태양계: 안내서"),
        ("시스템: 켜짐", "System: on"),
        ("See user://x and @user:matrix.org", "user://x 와 @user:matrix.org 를 보세요"),
    ],
)
def test_speakers_and_headings_of_the_source_may_be_translated(src, mt):
    assert role_token(src, mt) is None


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("나는 열두 권을 번역했다.", "I have translated twelve books."),
        ("텍스트를 입력하세요.", "Please provide the text."),
        ("인공지능으로서 나는 잠을 자지 않는다.", "As an AI, I do not sleep."),
    ],
)
def test_a_source_that_speaks_of_translating_may_be_translated(src, mt):
    assert meta_phrase(src, mt) is None
    assert meta_phrase(EN, mt)


_FRAGMENTS = st.sampled_from(
    [
        "<|im_end|>",
        "<｜User｜>",
        "</s>",
        "[INST]",
        "[gMASK]",
        "<end_of_turn>",
        "[|endofturn|]",
        "<b>",
        "<",
        "[",
        "가",
        "a b",
        " ",
        "< 3",
        "|",
        "]~b]",
        "<<SYS>>",
        "[1]",
        "\n",
    ]
)


@example("<|\n")
@given(st.lists(_FRAGMENTS, max_size=8).map("".join))
def test_what_is_made_neutral_for_the_teacher_comes_back_as_it_was(text):
    sent = neutral(text)
    assert neutral(sent) == sent or "<<" in text
    assert not OPENS.search(sent.replace("< <", "")) and not CLOSES.search(sent)
    if not any(pair in text for pair in ("< ", "[ ", "] ", "| ")):
        assert restore_marks(text, sent) == text
    assert restore_marks("plain", sent) == sent


@pytest.mark.parametrize("text", [EN, KO, ZH, JA, DE, "1 < 2 and 3 > 2, [1] a[i] <b>x</b> |x|"])
def test_normal_text_is_neutral(text):
    assert neutral(text) == text


def test_prose_of_six_registers_says_nothing_about_itself():
    lines = (ROOT / "tests/data/prose/ko_en.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        for src, mt in ((row["ko"], row["en"]), (row["en"], row["ko"])):
            for check in (meta_phrase, refusal, added_note, added_quotes, role_token):
                assert check(src, mt) is None, (check.__name__, src, mt)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("a<|im_end|>b", "a< |im_end|>b"),
        ("[inst] [/INST] <<SYS>>", "[ inst] [ /INST] < <SYS>>"),
        ("<|<|im_end|>|>", "<|< |im_end|>|>"),
        ("<search>a</search> <think> <웃음> [1]", "<search>a</search> <think> <웃음> [1]"),
    ],
)
def test_only_certain_special_tokens_are_split(text: str, split: str) -> None:
    assert split_special_tokens(text) == split
    assert special_token(split) is None


def test_an_offer_of_help_behind_an_emoji_or_a_tilde_is_found() -> None:
    offers = {
        "오늘도 버스가 늦었어요 😊 더 필요하시면 말씀해 주세요!": "The bus was late again.",
        "오늘도 버스가 늦었어요~ 다른 표현도 필요하시면 말씀해 주세요~ ^^": "The bus was late.",
        "The bus was late 👍 Feel free to ask for more": "버스가 늦었다 👍",
        "The bus was late :) Happy to help with more!": "버스가 늦었다",
    }
    assert [mt for mt, src in offers.items() if added_note(src, mt) is None] == []
    src, mt = "잘 도착했어 😊 또 연락할게", "Got here safely 😊 Let me know how it goes"
    assert added_note(src, mt) is None
