"""Check that dialogues become rows or are dropped with a reason."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from scorekit.errors import UserError
from trainer.__main__ import app
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.data import load_turns
from trainer.roleplay.prepare import Dialogue, Dropped, Limits, prepare, split, turns_of

POLICY = "demo/models/policy"


def dialogue_of(*turns: str) -> Dialogue:
    """Return a dialogue from texts prefixed by a role: `s:`, `u:` or `a:`."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
    return Dialogue("d", tuple(messages), {})


def test_each_answer_to_the_player_is_a_row():
    turns = list(turns_of(dialogue_of("s:책", "a:어서", "u:1", "a:2", "a:3", "u:4", "a:5"), None))
    assert [turn.place for turn in turns] == [1, 3, 4, 6]
    assert [turn.reason for turn in turns if isinstance(turn, Dropped)] == ["not_after_user"] * 2
    last = turns[-1]
    assert [m["content"] for m in last.prompt] == ["책", "어서", "1", "2", "3", "4"]
    assert (last.id, last.reference) == ("d:6", "5")


@given(st.lists(st.sampled_from("ua"), min_size=1, max_size=12), st.integers(1, 6))
def test_the_context_is_cut_but_never_the_system_turn(roles, context):
    dialogue = dialogue_of("s:책", *(f"{role}:{position}" for position, role in enumerate(roles)))
    turns = [turn for turn in turns_of(dialogue, context) if not isinstance(turn, Dropped)]
    answers = [n for n in range(1, len(roles)) if roles[n - 1 : n + 1] == ["u", "a"]]
    assert [turn.place for turn in turns] == [n + 1 for n in answers]
    for turn in turns:
        system, *messages = turn.prompt
        assert system["role"] == "system"
        assert len(messages) <= context
        assert messages[-1]["role"] == "user"
        assert messages[0]["role"] == "user" or len(messages) == turn.place - 1
        assert list(dialogue.messages[turn.place - len(messages) : turn.place]) == messages


def test_what_is_too_long_or_stands_twice_is_dropped_with_its_reason():
    limits = Limits(
        max_prompt_length=3,
        max_completion_length=3,
        prompt_tokens=lambda prompt: sum(len(m["content"]) for m in prompt),
        text_tokens=len,
    )
    dialogues = [
        dialogue_of("u:abc", "a:xy"),
        dialogue_of("u:abc", "a:xy"),
        dialogue_of("u:abcd", "a:x"),
        dialogue_of("u:a", "a:xyz"),
    ]
    accepted, dropped = prepare(dialogues, limits)
    assert [turn.reference for turn, _ in accepted] == ["xy"]
    assert [(drop.reason, drop.measured) for drop in dropped] == [
        ("duplicate", ""),
        ("prompt_too_long", "4 tokens"),
        ("reference_too_long", "4 tokens"),
    ]


def test_no_scenario_is_on_both_sides_and_the_seed_chooses():
    turns = [
        turn
        for n in range(40)
        for turn in turns_of(
            Dialogue(f"d{n}", dialogue_of(f"s:책{n % 8}", "u:a", "a:b").messages, {}), None
        )
    ]
    by = {turn.id: turn for turn in turns}
    assert len(by) == 40
    train, held_out = split(turns, 0.2, "dialogue", 0)
    assert len(held_out) == 8
    assert not {t.dialogue for t in train} & {t.dialogue for t in held_out}
    assert split(turns, 0.2, "dialogue", 0) == (train, held_out)
    assert split(turns, 0.2, "dialogue", 1) != (train, held_out)
    assert split(turns, 0, "dialogue", 0) == (turns, [])
    many = [replace(turns[0], id=f"{n}", dialogue=f"d{n}") for n in range(100)]
    assert len(split(many, 0.07, "dialogue", 0)[1]) == 7  # 0.07 * 100 is 7.000000000000001
    with pytest.raises(UserError, match="none can be held out"):
        split(turns[:1], 0.2, "scenario", 0)


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def test_the_command_writes_rows_that_the_trainer_reads(tmp_path):
    system = "당신은 이제 「사야」이다.\n플레이어 이름: 민수\n말투: 존댓말"
    source = write(
        tmp_path / "dialogues.jsonl",
        {
            "id": "a",
            "system": system,
            "user": "뭐 해?",
            "assistant": '사야가 웃었다.\n"책 읽어요."',
        },
        {
            "id": "b",
            "messages": [
                {"role": "user", "content": "안녕" * 40},
                {"role": "assistant", "content": "응"},
            ],
        },
        {
            "id": "c",
            "messages": [
                {"role": "user", "content": "안녕"},
                {"role": "assistant", "content": "응"},
            ],
        },
    )
    out = tmp_path / "out"
    command = ["roleplay", "prepare", source, "--out", str(out), "--eval-ratio", "0"]
    lengths = ["--max-prompt-length", "80", "--max-completion-length", "60", "--model", POLICY]
    result = CliRunner().invoke(app, [*command, *lengths])
    assert result.exit_code == 0, result.output
    turns = load_turns(str(out / "train.jsonl"), RoleplayData(from_prompt=False))
    assert [(t.id, t.player_name, t.character_name, t.speech_level) for t in turns] == [
        ("a:2", "민수", "사야", "polite"),
        ("c:1", None, None, None),
    ]
    dropped = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    assert Counter(row["reason"] for row in dropped) == {"prompt_too_long": 1}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rows"] == {"train": 2, "eval": 0, "dropped": 1}
    repeated = CliRunner().invoke(app, command)
    assert repeated.exit_code == 2
    assert "--overwrite" in repeated.output


def test_a_file_without_rows_is_said_to_be_so(tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    command = ["roleplay", "prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "in.jsonl: no rows" in done.stderr


@pytest.mark.parametrize(
    ("row", "extra", "message"),
    [
        ({"prompt": "x"}, [], "no messages"),
        ({"messages": []}, [], "expected a list of messages"),
        ({"user": "a", "assistant": "b"}, ["--column", "player=x"], "FIELD=COLUMN"),
        ({"user": "a", "assistant": "b"}, ["--max-prompt-length", "9"], "--model"),
        ({"assistant": "b"}, [], "all 1 turns were dropped: not_after_user 1"),
        ({"user": "a", "assistant": "b"}, ["--eval-ratio", "0.5"], "none can be held out"),
        ({"user": "a", "assistant": "b<|im_end|>"}, [], "in.jsonl line 1: turn 2 (assistant): has"),
        ({"user": "{{user}}", "assistant": "b"}, [], "line 1: turn 1 (user): has the placeholder"),
        ({"user": "</s>", "assistant": "b"}, ["--model", POLICY], "has the control token '</s>'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, row, extra, message):
    source = write(tmp_path / "in.jsonl", row)
    command = ["roleplay", "prepare", source, "--out", str(tmp_path / "out"), "--eval-ratio", "0"]
    result = CliRunner().invoke(app, [*command, *extra])
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", [[], ["--model", POLICY]])
def test_control_tokens_are_written_as_text_on_demand(tmp_path, model):
    row = {"system": "You are {{char}}.", "user": "a</s>b", "assistant": "c"}
    source = write(tmp_path / "in.jsonl", row)
    out = tmp_path / "out"
    command = ["roleplay", "prepare", source, "--out", str(out), "--eval-ratio", "0", *model]
    options = ["--control-tokens", "neutralize", "--placeholders", "keep"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "1 of 1 rows have control tokens" in result.stderr
    (turn,) = load_turns(str(out / "train.jsonl"), RoleplayData())
    assert turn.user_turn == "a< /s>b" and turn.prompt[0]["content"] == row["system"]
    settings = json.loads((out / "manifest.json").read_text())
    assert (settings["control_tokens"], settings["placeholders"]) == ("neutralize", "keep")
