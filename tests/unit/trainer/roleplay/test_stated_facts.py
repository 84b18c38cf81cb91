"""Check which facts about player, character and level a system turn states."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.roleplay.stated_facts import extract_facts

BOOK = """「비 오는 옥상」 시나리오북

1. 역할 선언
- 당신은 이제 「사야」이다.
- 플레이어(하야토)의 선택에 따라 관계가 변한다.
3. 주인공 정의
- 이름: 사야
- 나이: 19
4. 플레이어 정의
- 이름: 하야토
- 주인공과의 기본 관계: 선배
6. 발화와 분위기 규칙
- 주인공의 기본 말투 범주: 존댓말
- 주인공의 말투 특징: 조심스럽다
7. 가장 최근 상호작용
- 플레이어의 가장 최근 턴: 반말로 물었다.
"""


@pytest.mark.parametrize(
    ("system", "player", "character", "level"),
    [
        (BOOK, "하야토", "사야", "polite"),
        ("플레이어 이름: 민수\n캐릭터 이름: 하린\n말투: 반말(친근)", "민수", "하린", "plain"),
        ("주인공 이름: 사야 (19세)\n사용자의 이름: 소마", "소마", "사야", None),
        ("# 캐릭터\n이름: 유나\n\n# 플레이어\n이름: 지훈\n\n반말을 쓴다.", "지훈", "유나", "plain"),
        ("player: Tom\ncharacter: Alice Smith", "Tom", "Alice Smith", None),
        ("너는 “하린”이야. 반말 금지. 존댓말로 답한다.", None, "하린", "polite"),
        ("존댓말을 쓰지 않는다. 반말을 쓴다.", None, None, "plain"),
        ("존댓말과 반말을 섞지 않는다.", None, None, None),
        ("플레이어 이름: 민수\n플레이어 이름: 지훈", None, None, None),
        ("User: 안녕\nuser: 응", None, None, None),
        ("캐릭터: {{char}}", None, None, None),
        ("분위기를 해체하고 다시 세운다.", None, None, None),
        (
            "당신은 사막 시장의 상인 승은입니다. 상대는 여행자 세아입니다. 승은은 세아에게 "
            "존댓말을 씁니다.",
            "세아",
            "승은",
            "polite",
        ),
        ("너는 유나야. 유나는 반말을 쓴다.", None, "유나", "plain"),
        ("당신은 친절한 조수입니다. 상대는 손님입니다.", None, None, None),
        ("", None, None, None),
    ],
)
def test_what_is_stated_is_read_and_nothing_else(system, player, character, level):
    expected = {"player_name": player, "character_name": character, "speech_level": level}
    assert extract_facts(system) == expected
    assert extract_facts(unicodedata.normalize("NFD", system)) == expected


@given(
    st.text(
        alphabet=st.sampled_from(list("이름:- \n플레이어주인공「」\"'()말투반존댓.1#")),
        max_size=300,
    )
)
def test_no_text_is_too_odd(text):
    facts = extract_facts(text)
    assert all(value is None or value for value in facts.values())
