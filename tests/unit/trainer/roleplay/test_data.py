"""Check that rows become turns or are refused with a reason."""

from __future__ import annotations

import json

import pytest

from scorekit.errors import UserError
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.data import columns_of, in_both, load_turns, missing_facts

USER = {"role": "user", "content": "뭐 해?"}
SYSTEM = {"role": "system", "content": "플레이어 이름: 민수\n캐릭터 이름: 하린\n말투: 반말"}


def load(tmp_path, *rows, **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return load_turns(str(path), RoleplayData.model_validate(data))


def test_prompt_is_preferred_and_prompt_messages_stand_in(tmp_path):
    other = [{"role": "user", "content": "다른 말"}]
    turns = load(
        tmp_path,
        {"prompt": [SYSTEM, USER], "prompt_messages": other},
        {"prompt_messages": [SYSTEM, USER]},
        {"prompt": json.dumps([SYSTEM, USER])},
        {"prompt": f"SYSTEM: {SYSTEM['content']}\nUSER: 뭐 해?"},
        {"prompt": "SYSTEM: x\nUSER: y", "prompt_messages": [SYSTEM, USER]},
    )
    assert [turn.prompt for turn in turns] == [(SYSTEM, USER)] * 5
    assert {turn.user_turn for turn in turns} == {"뭐 해?"}
    assert len({turn.id for turn in turns}) == 5


def test_columns_win_over_what_the_prompt_states(tmp_path):
    row = {"prompt": [SYSTEM, USER], "meta": {"player": "지훈", "style": "존댓말"}, "id": 7}
    columns = {"player_name": "meta.player", "speech_level": "meta.style"}
    (turn,) = load(tmp_path, row, columns=columns)
    assert (turn.player_name, turn.character_name, turn.speech_level) == ("지훈", "하린", "polite")
    assert turn.id == "7"
    (turn,) = load(tmp_path, row, from_prompt=False)
    assert (turn.player_name, turn.character_name, turn.speech_level) == (None, None, None)


def test_what_rows_do_not_tell_is_counted(tmp_path):
    turns = load(tmp_path, {"prompt": [SYSTEM, USER], "reference": " "}, {"prompt": "안녕"})
    assert missing_facts(turns) == ("reference 2, player_name 1, character_name 1, speech_level 1")
    assert missing_facts([]) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [SYSTEM]}, "the last turn is the system's"),
        ({"prompt": [USER, {"role": "assistant", "content": "응"}]}, "roleplay prepare"),
        ({"text": "x"}, "no prompt, nor prompt_messages (the row has text)"),
        ({"prompt": []}, "expected a list of messages"),
        ({"prompt": [{"role": "npc", "content": "x"}]}, "message 0: expected one of the roles"),
        ({"prompt": [{"role": "user", "content": ""}]}, "message 0: content is empty"),
        ({"prompt": [{"role": "user", "content": "a\0"}]}, "NUL"),
        ({"prompt": [USER, SYSTEM]}, "message 1: only the first message may be a system turn"),
        ({"prompt": "<|im_start|>user\n안녕<|im_end|>"}, "prompt_messages"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "parts other than text"),
        ({"prompt": "안녕", "speech_level": "cute"}, "speech_level: 'cute' is unknown"),
        ({"prompt": "안녕", "player_name": 3}, "player_name: expected a text"),
        ({"prompt": "안녕", "reference": "\0"}, "reference: has a NUL character"),
        ({"prompt": "안녕", "player_name": "민\0수"}, "player_name: has a NUL character"),
        ({"prompt": "안녕", "character_name": "하\n린"}, "character_name: expected one line"),
        ({"prompt": "안녕", "place": "x"}, "place: expected a whole number"),
    ],
)
def test_a_wrong_row_is_named_with_what_to_do(tmp_path, row, message):
    with pytest.raises(UserError) as raised:
        load(tmp_path, {"prompt": "안녕"}, row)
    (line,) = raised.value.lines
    assert "line 2" in line
    assert message in line


def test_each_wrong_row_has_a_line(tmp_path):
    with pytest.raises(UserError, match="25 of 26 rows") as raised:
        load(tmp_path, {"prompt": "안녕"}, *[{"prompt": []}] * 25)
    assert len(raised.value.lines) == 21
    assert raised.value.lines[-1] == "and 5 more"


def test_ids_that_stand_twice_are_refused_and_equal_rows_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="1 ids occur more than once"):
        load(tmp_path, {"id": "a", "prompt": "안녕"}, {"id": "a", "prompt": "응"})
    first, second = load(tmp_path, {"prompt": "안녕"}, {"prompt": "안녕"})
    assert second.id == f"{first.id}-2"


def test_an_unknown_field_of_columns_is_refused():
    with pytest.raises(ValueError, match="unknown field 'player'"):
        RoleplayData(columns={"player": "meta.player"})


def test_columns_of_turns_are_lists_by_the_fields_names(tmp_path):
    turns = load(tmp_path, {"prompt": [SYSTEM, USER], "reference": "응"}, {"prompt": "안녕"})
    columns = columns_of(turns)
    assert columns["prompt"][0] == [SYSTEM, USER]
    assert columns["player_name"] == ["민수", None]
    assert columns["reference"] == ["응", None]


def test_held_out_turns_that_are_learned_from_are_told(tmp_path):
    turns = load(
        tmp_path, {"prompt": [SYSTEM, USER]}, {"prompt": [SYSTEM, {**USER, "content": "왜"}]}
    )
    assert "of 1 turns 0 have a prompt, and 1 a scenario" in in_both(turns[:1], turns[1:])
    other = load(tmp_path, {"prompt": [{**SYSTEM, "content": "다른 세계"}, USER]})
    assert in_both(turns, other) == ""
