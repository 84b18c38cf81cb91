"""Check which rows are read as conversations and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.chat import turns
from trainer.chat.rows import conversations_of, read_conversations

ROW = {"messages": turns("안녕", "네", "왜?", "그냥요", system="시스템")}


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_dialogue_is_one_row_or_one_a_turn(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ROW)
    (conversation,) = read_conversations(path)
    assert conversation == (f"{path} line 1", ROW["messages"], "all")
    turn_conversations = read_conversations(path, "each")
    assert [(len(c.turns), c.trained_turns) for c in turn_conversations] == [
        (3, "last"),
        (5, "last"),
    ]
    assert [c.trained_turns for c in read_conversations(path, "last")] == ["last"]


@pytest.mark.parametrize("prompt", ["prompt", "prompt_messages"])
@pytest.mark.parametrize("reply", ["completion", "reference"])
def test_of_a_prompt_and_its_reply_only_the_reply_is_learned(prompt: str, reply: str) -> None:
    row = {prompt: ROW["messages"][:4], reply: "그냥요"}
    (conversation,) = conversations_of(row, "row 1", "all")
    assert conversation == ("row 1", ROW["messages"], "last")
    (from_messages,) = conversations_of({**row, reply: [ROW["messages"][4]]}, "row 1", "each")
    assert from_messages == conversation


def test_what_a_table_has_no_value_for_is_left_out() -> None:
    row = {"messages": [{**turn, "tool_calls": None, "name": None} for turn in ROW["messages"]]}
    (conversation,) = conversations_of(row, "row 1", "all")
    assert conversation.turns == ROW["messages"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["no"], "expected an object of fields, not an array"),
        ({"text": "no"}, "neither `messages`, nor a `prompt` with"),
        ({"prompt": turns("a")}, "neither `messages`, nor a `prompt` with"),
        ({"messages": "no"}, "messages: expected a list of messages"),
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "turn 1: expected an object with `role`"),
        ({"messages": [{"role": "user"}]}, "turn 1: has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "turn 1: content: expected a text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "a lone surrogate"),
        ({"messages": turns("a\0", "b")}, "turn 1: content: has a NUL character"),
        ({"prompt": turns("a"), "reference": "b\0"}, "turn 1: content: has a NUL character"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part has no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\0"}]}]},
            "turn 1: content: has a NUL character",
        ),
        ({"messages": turns("a")}, "no turn of the assistant"),
        ({"messages": turns("a", "b")[1:]}, "begins with a turn of the assistant"),
        ({"messages": turns("a", " ")}, "its last turn is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "parts other than text. Give such rows as `input_ids`",
        ),
    ],
)
def test_what_is_no_conversation_is_told(row: Any, reason: str) -> None:
    with pytest.raises(UserError, match=r"^row 7: ") as caught:
        list(conversations_of(row, "row 7", "all"))
    assert reason in str(caught.value)


def test_wrong_rows_are_told_in_one_line_with_their_number(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ROW, {"text": 1}, {"messages": []}, ROW)
    with pytest.raises(UserError, match="2 of 4 rows cannot be used") as caught:
        read_conversations(path)
    assert [line.split(": ")[0] for line in caught.value.lines] == [
        f"{path} line {n}" for n in (2, 3)
    ]
    assert len(read_conversations(path, limit=1)) == 1


def test_two_kinds_of_rows_are_not_mixed(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", ROW, {"prompt": turns("a"), "completion": "b"})
    with pytest.raises(UserError, match="turns: last"):
        read_conversations(path)
    assert len(read_conversations(path, "last")) == 2
