"""Check which tokens of id rows and message rows are trained, and which rows are omitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.kits.trainer.chat import byte_tokenizer, chat_tokenizer, template_text, turns
from tests.kits.trainer.sft import dialogues, save_chat_model, sft_config, write_rows
from trainer.sft.config import SftConfig
from trainer.sft.curation_record import CurationRecord, RecordEntry
from trainer.sft.prepare import SftPart, check_findings, load_train
from trainer.sft.rows import SftRow, actions, cut_to, rows_of, rows_of_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("sft") / "model")


def part_of(model: Path, folder: Path, rows: list[Any], **sections: Any) -> SftPart:
    cfg = sft_config(model, write_rows(folder / "rows.jsonl", rows), folder / "run", **sections)
    return load_train(cfg, chat_tokenizer("chatml"))


def trained_text(row: SftRow) -> str:
    ids = [i for i, is_trained in zip(row.ids, row.mask, strict=True) if is_trained]
    return str(byte_tokenizer().decode(ids))


def test_replies_and_their_ends_are_learned_to_the_last_byte(model: Path, tmp_path: Path) -> None:
    row = {"messages": turns("안녕", "네 뷁", "왜?", "그냥 👩‍👩‍👧‍👦", system="시스템")}
    part = part_of(model, tmp_path, [row])
    assert trained_text(part.rows[0]) == "네 뷁<|im_end|>그냥 👩‍👩‍👧‍👦<|im_end|>"
    assert [finding.name for finding in part.findings if not finding.ok] == []
    labels = part.rows[0].labels
    assert [i for i in labels if i != -100] == [
        i for i, is_trained in zip(part.rows[0].ids, part.rows[0].mask, strict=True) if is_trained
    ]


def test_single_turns_are_left_out(model: Path, tmp_path: Path) -> None:
    messages = turns("안녕", "네 뷁", "왜?", "그냥")
    messages[1]["weight"] = 0  # type: ignore[assignment]
    part = part_of(model, tmp_path, [{"messages": messages}])
    assert trained_text(part.rows[0]) == "그냥<|im_end|>"
    messages[3]["weight"] = 0  # type: ignore[assignment]
    with pytest.raises(UserError, match="1 of 1 rows: no token is learned"):
        part_of(model, tmp_path, [{"messages": messages}])


def test_turns_are_learned_all_the_last_or_each_in_a_row(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": turns("안녕", "네", "왜?", "그냥")}]
    texts_by_mode = {
        mode: [
            trained_text(row) for row in part_of(model, tmp_path, rows, data={"turns": mode}).rows
        ]
        for mode in ("all", "last", "each")
    }
    assert texts_by_mode == {
        "all": ["네<|im_end|>그냥<|im_end|>"],
        "last": ["그냥<|im_end|>"],
        "each": ["네<|im_end|>", "그냥<|im_end|>"],
    }


def test_every_token_is_learned_where_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    part = part_of(model, tmp_path, dialogues(1), sft={"assistant_only_loss": False})
    assert set(part.rows[0].mask) == {1}


def test_long_rows_are_left_out_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": turns("안녕", "네")}, {"messages": turns("안녕", "네" * 300)}]
    part = part_of(model, tmp_path, rows, data={"max_length": 200})
    assert len(part.rows) == 1
    assert part.counts["left_out"] == {"more than 200 tokens": 1}
    with pytest.raises(UserError, match=r"line 2: .* tokens are more than data.max_length 200"):
        part_of(model, tmp_path, rows, data={"max_length": 200, "overlong": "refuse"})
    with pytest.raises(UserError, match="no rows remain"):
        part_of(model, tmp_path, rows[1:], data={"max_length": 200})


def test_a_long_row_is_cut_behind_a_turn_and_through_one_only_where_asked(
    model: Path, tmp_path: Path
) -> None:
    rows = [{"messages": turns("안녕", "네", "왜?", "그냥" * 100)}]
    for way, text in (("cut_turns", "네<|im_end|>"), ("cut", "네<|im_end|>그")):
        part = part_of(model, tmp_path, rows, data={"max_length": 100, "overlong": way})
        assert trained_text(part.rows[0]).startswith(text)
        assert len(part.rows[0].ids) <= 100
        assert (trained_text(part.rows[0]) == text) == (way == "cut_turns")
        assert part.counts["left_out"] == {"cut to 100 tokens, and kept": 1}


def test_a_row_without_a_turn_that_fits_or_with_images_is_not_cut() -> None:
    row = SftRow("r", list(range(10)), [0, 0, 0, 1, 1, 0, 0, 1, 1, 1])
    assert actions(row.mask) == [(3, 5), (7, 10)]
    assert cut_to(row, 8, through_turns=False) == SftRow("r", [0, 1, 2, 3, 4], [0, 0, 0, 1, 1])
    assert cut_to(row, 8, through_turns=True) == SftRow("r", list(range(8)), row.mask[:8])
    assert cut_to(row, 4, through_turns=False) is None
    assert cut_to(row, 3, through_turns=True) is None
    assert cut_to(SftRow("r", row.ids, row.mask, ("a.png",)), 8, through_turns=False) is None


def test_ids_are_learned_by_their_mask(model: Path, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "action_mask": [0, 1, 0, 1, 1]}
    part = part_of(model, tmp_path, [row, {**row, "leave_out": [0]}])
    assert [r.labels for r in part.rows] == [[-100, 6, -100, 8, 9], [-100, -100, -100, 8, 9]]
    assert part.template is None and part.findings == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": None}, "`input_ids` without an `action_mask`"),
        ({"action_mask": [1]}, "3 input_ids, but an action_mask of 1"),
        ({"action_mask": [0, 0, 0]}, "no token to train on"),
        ({"action_mask": [0, 2, 0]}, "action_mask: 2 is no whole number from 0 to 1"),
        ({"action_mask": [0, True, 0]}, "action_mask: True is no whole number from 0 to 1"),
        ({"input_ids": [1, 2, 300]}, "input_ids: 300 is no whole number from 0 to 264"),
        ({"input_ids": "1 2 3"}, "input_ids: expected a list of whole numbers"),
        ({"leave_out": [1]}, "leave_out: 1 is no whole number from 0 to 0"),
        ({"leave_out": [0]}, "no token to train on"),
        ({"images": ["none.png"]}, "none.png: no such file (data.image_folder)"),
        ({"images": "a.png"}, "images: expected a list of paths"),
    ],
)
def test_wrong_ids_are_told_row_by_row(changes: dict[str, Any], message: str) -> None:
    row = {"input_ids": [1, 2, 3], "action_mask": [0, 1, 0]}
    with pytest.raises(UserError, match="1 of 2 rows cannot be used") as caught:
        rows_of_ids("f", [("row 1", row), ("row 2", row | changes)], 264, Path("/nowhere"))
    assert caught.value.lines[0].startswith("row 2: ") and message in caught.value.lines[0]


def test_the_configs_are_right() -> None:
    for path in sorted((Path(__file__).parents[4] / "configs/sft").glob("*.yaml")):
        load_config(SftConfig, path)


def test_ids_and_messages_are_not_mixed(tmp_path: Path) -> None:
    rows = [{"input_ids": [1], "action_mask": [1]}, *dialogues(1)]
    with pytest.raises(UserError, match="line 2: some rows have `input_ids` and others not"):
        rows_of(str(write_rows(tmp_path / "rows.jsonl", rows)), None, None)


def test_a_faulty_template_is_refused_or_told(model: Path, tmp_path: Path) -> None:
    cfg = sft_config(model, write_rows(tmp_path / "r.jsonl", dialogues(2)), tmp_path / "run")
    wrong = byte_tokenizer(template_text("qwen2_5_training"))
    part = load_train(cfg, wrong)
    with pytest.raises(UserError, match=r"fails its check: labelled text: .*--fix"):
        check_findings(cfg, part)
    cfg.sft.template_check = "warn"
    check_findings(cfg, part)


def test_rows_that_the_record_condemns_are_left_out(model: Path, tmp_path: Path) -> None:
    ids: dict[str, Any] = {"input_ids": [1, 2, 3], "action_mask": [0, 1, 1]}
    names = ("good", "wrong", "doubted", "lucky")
    rows = [{**ids, "id": f"run/{name}", "question_id": name} for name in names]
    entries = [
        RecordEntry("wrong", "verify", "drop", "GT_ERROR"),
        RecordEntry("doubted", "diagnose", "doubt", "reference_suspected"),
        RecordEntry("lucky", "hallucinations", "drop", "luck", "run/lucky"),
    ]
    path = tmp_path / "record.jsonl"
    CurationRecord(entries).write(path)
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows))}
    part = part_of(model, tmp_path, rows, data=data | {"record": str(path)})
    assert len(part.rows) == 1
    assert part.left_out == {
        "verified: GT_ERROR": 1,
        "diagnosed: reference_suspected": 1,
        "hallucinations: luck": 1,
    }
    with pytest.raises(UserError, match=r"data\.record: .*leaves no row"):
        part_of(model, tmp_path, rows[1:], data=data | {"record": str(path)})


def test_rows_of_ids_that_cannot_be_used_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"input_ids": [1, 2], "action_mask": [0, 1]}
    path = write_rows(tmp_path / "rows.jsonl", [good, {**good, "action_mask": [1]}])
    path.write_text(path.read_text() + "no JSON\n")
    rows = rows_of(str(path), None, None)
    (row,) = rows_of_ids(str(path), rows, 264, tmp_path, "skip")
    assert row.ids == [1, 2]
    assert "2 of 3 rows cannot be used, and are left out" in caplog.text
    with pytest.raises(UserError, match="2 of 3 rows cannot be used:"):
        rows_of_ids(str(path), rows, 264, tmp_path)
