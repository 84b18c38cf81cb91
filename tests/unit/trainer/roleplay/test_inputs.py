"""Check which inputs the reward functions accept and refuse."""

from __future__ import annotations

import math

import pytest

from scorekit.errors import UserError
from trainer.roleplay import rewards
from trainer.roleplay.rewards import (
    REWARDS,
    read_replies,
    reward_character_consistency,
    reward_format,
)

GOOD = '유나는 웃었다.\n"오늘은 늦게까지 있을게요."'


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(rewards, "_setting", None)


@pytest.mark.parametrize("level", ["polite", "존댓말", "해요체", " 존대 ", "FORMAL"])
def test_a_level_may_have_any_name_that_data_may_have(level):
    prompt, reply = ["언제 가?"], ['유나는 웃었다.\n"곧 가요."']
    columns = {"character_name": ["유나"], "speech_level": [level]}
    assert reward_character_consistency(prompt, reply, **columns) == [1]
    columns["speech_level"] = ["반말"]
    assert reward_character_consistency(prompt, reply, **columns) == [0.5]
    (read,) = read_replies(prompt, reply, {"speech_level": [level]}, False)
    assert read.speech_level == "polite"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speech_level": ["cute"]},
            r"speech_level\[0\]: 'cute' is unknown. Choose from polite, .*존댓말",
        ),
        ({"speech_level": ["存댓말"]}, r"speech_level\[0\]: '存댓말' is unknown"),
        ({"speech_level": [1]}, r"speech_level\[0\]: expected a text or None, not int 1"),
        ({"speech_level": "polite"}, "speech_level: expected a list .* not str 'polite'"),
        ({"speech_level": []}, "speech_level: 0 entries for 1 completions"),
        ({"player_name": "민"}, "player_name: expected a list"),
        ({"player_name": ["민수", "유나"]}, "player_name: 2 entries for 1 completions"),
        ({"character_name": [["유나"]]}, r"character_name\[0\]: expected a text or None"),
        ({"character_name": {"a": 1}}, "character_name: expected a list"),
        ({"reference": [math.nan]}, r"reference\[0\]: expected a text or None, not float nan"),
        ({"reference": 3}, "reference: expected a list"),
        ({"completions": "가"}, "completions: expected a list"),
        ({"completions": None}, "completions: expected a list .* not None"),
        ({"completions": [None]}, r"completions\[0\]: expected a text or a list of messages"),
        ({"completions": [["가"]]}, r"completions\[0\]: expected a text or a list of messages"),
        ({"completions": [[{"content": 1}]]}, r"completions\[0\]: expected a text as content"),
        ({"prompts": "가"}, "prompts: expected a list"),
        ({"prompts": ["가", "나"]}, "prompts: 2 entries for 1 completions"),
        ({"prompts": [{"role": "user", "content": "가"}]}, r"prompts\[0\]: expected a text or a"),
    ],
)
@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.short)
def test_what_no_function_knows_is_an_error_of_one_line(reward, changes, message):
    arguments = {
        "prompts": ["언제 가?"],
        "completions": [GOOD],
        "reference": [GOOD],
        "player_name": ["민수"],
        "character_name": ["유나"],
        "speech_level": ["polite"],
    }
    prompts, completions, *_ = arguments.values()
    assert len(read_replies(prompts, completions, arguments, False)) == 1
    with pytest.raises(UserError, match=message) as raised:
        reward.function(**(arguments | changes))
    assert "\n" not in str(raised.value)


def test_columns_of_a_trainer_that_no_function_reads_are_passed_over():
    columns = {"completion_ids": [[1]], "trainer_state": object(), "scenario": ["a"], "place": [1]}
    assert reward_format(["가"], [GOOD], **columns, speech_level=[None], reference=[None]) == [1]
    assert reward_format([], []) == []
