"""Test the files of what was generated for the next updates."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from trainer.runs.batches import RolloutBuffer

ROWS = [{"id": "a", "logprobs": [-0.1, -1e-300, -2.5]}, {"id": "b", "text": "한국어\u2028中文"}]


def test_rows_are_read_as_they_were_written(tmp_path):
    buffer = RolloutBuffer(tmp_path, 0)
    assert buffer.read(1) == []
    for row in ROWS:
        buffer.append(7, row)
    buffer.append(8, {"id": "c"})
    assert RolloutBuffer(tmp_path, 0).read(7) == ROWS
    assert buffer.read(8) == [{"id": "c"}]


def test_each_process_writes_its_own_file_and_reads_those_of_all(tmp_path):
    buffers = [RolloutBuffer(tmp_path, rank) for rank in range(3)]
    for rank, buffer in enumerate(buffers):
        buffer.append(2, {"rank": rank})
    assert len(list((tmp_path / "buffer").iterdir())) == 3
    for buffer in buffers:
        assert buffer.read(2) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_a_line_of_a_killed_process_is_left_out_and_the_next_one_starts_a_line(tmp_path):
    buffer = RolloutBuffer(tmp_path, 0)
    for row in ROWS:
        buffer.append(3, row)
    path = tmp_path / "buffer/update-000003-0.jsonl"
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        complete_rows = ROWS[: content[:cut].count(b"\n")]
        resumed = RolloutBuffer(tmp_path, 0)
        assert resumed.read(3)[: len(complete_rows)] == complete_rows
        resumed.append(3, {"id": "new"})
        assert RolloutBuffer(tmp_path, 0).read(3) == [*complete_rows, {"id": "new"}]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    buffer = RolloutBuffer(tmp_path, 0)
    buffer.append(3, ROWS[0])
    path = tmp_path / "buffer/update-000003-0.jsonl"
    path.write_text("{\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UserError, match=r"update-000003-0\.jsonl line 1"):
        buffer.read(3)


def test_updates_that_a_checkpoint_holds_are_removed_and_no_others(tmp_path):
    buffer = RolloutBuffer(tmp_path, 0)
    buffer.cut(5)  # there is no folder yet
    for update in (4, 5, 6, 1234567):
        buffer.append(update, {"update": update})
        RolloutBuffer(tmp_path, 1).append(update, {"update": update})
    (tmp_path / "buffer/notes.txt").write_text("of the user")
    buffer.cut(5)
    names = sorted(path.name for path in (tmp_path / "buffer").iterdir())
    assert names == [
        "notes.txt",
        "update-000006-0.jsonl",
        "update-000006-1.jsonl",
        "update-1234567-0.jsonl",
        "update-1234567-1.jsonl",
    ]


def test_files_of_other_names_are_left_alone(tmp_path):
    buffer = RolloutBuffer(tmp_path, 0)
    assert buffer.updates() == []
    for update in (12, 3):
        buffer.append(update, ROWS[0])
    names = ("update-x.jsonl", "update-000003.jsonl", "notes.txt", "update-000003-0.jsonl.bak")
    for name in names:
        (buffer.folder / name).write_text("no JSON")
    assert buffer.updates() == [3, 12] and buffer.read(3) == [ROWS[0]]
    buffer.cut(12)
    assert buffer.updates() == []
    assert sorted(path.name for path in buffer.folder.iterdir()) == sorted(names)
