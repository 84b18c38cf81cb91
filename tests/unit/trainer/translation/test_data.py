"""Check how rows become examples and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from scorekit.config import check_config
from scorekit.errors import UserError
from tests.kits.trainer.runs import example
from trainer.translation.config import TranslationConfig
from trainer.translation.data import (
    Example,
    format_translation_prompt,
    in_both,
    load_examples,
    load_held_out,
    load_train,
    postprocess_translation,
)

ROW = {"id": "a", "src_text": "Open {text}", "src_lang": "English", "tgt_lang": "Korean"}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_jsonl_parquet_and_datasets_folders_give_the_same(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "id": "b", "ref_text": "열기"}]
    expected = [
        Example("a", "Open {text}", "English", "Korean", "en-US", "ko-KR", None),
        Example("b", "Open {text}", "English", "Korean", "en-US", "ko-KR", "열기"),
    ]
    assert load_examples(write(tmp_path / "a.jsonl", *rows)) == expected
    table = pyarrow.Table.from_pylist([{"ref_text": None, **row} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "dev.parquet")
    assert load_examples(tmp_path / "dev.parquet") == expected
    assert load_examples(tmp_path, split="dev") == expected
    data = datasets.Dataset.from_list([{"ref_text": None, **row} for row in rows])
    data.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "dict")
    assert load_examples(tmp_path / "flat") == expected
    assert load_examples(tmp_path / "dict", split="test", limit=1) == expected[:1]


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, "", ROW, "not json")
    assert len(load_examples(path, limit=2)) == 2


def test_a_missing_id_becomes_a_stable_hash(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key != "id"}
    first, second, third = load_examples(
        write(tmp_path / "a.jsonl", row, {**row, "src_text": "x"}, {**row, "id": 7})
    )
    assert first.id == load_examples(write(tmp_path / "b.jsonl", row))[0].id
    assert first.id != second.id
    assert len(first.id) == 16
    assert third.id == "7"


def test_ids_of_a_data_frame_and_ids_that_repeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**ROW, "id": 7.0}, {**ROW, "id": 8}]
    assert [e.id for e in load_examples(write(tmp_path / "a.jsonl", *rows))] == ["7", "8"]
    assert caplog.text == ""
    load_examples(write(tmp_path / "a.jsonl", *rows, {**ROW, "id": "7"}))
    assert "1 ids occur more than once, '7' first" in caplog.text


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", ROW)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.jsonl: Permission denied"):
        load_examples(path)


def test_a_code_in_place_of_a_name_finds_the_name(tmp_path: Path) -> None:
    row = {**ROW, "src_lang": "en-GB", "tgt_lang": "kor"}
    (example,) = load_examples(write(tmp_path / "a.jsonl", row))
    assert (example.src_lang, example.src_lang_code) == ("English", "en-GB")
    assert (example.tgt_lang, example.tgt_lang_code) == ("Korean", "ko-KR")


def test_language_codes_fall_back(tmp_path: Path) -> None:
    (example,) = load_examples(
        write(tmp_path / "a.jsonl", {**ROW, "src_lang": "Elbonian", "tgt_lang_code": "ko"})
    )
    assert (example.src_lang_code, example.tgt_lang_code) == ("Elbonian", "ko")


def test_a_column_map(tmp_path: Path) -> None:
    row = {"source": "Hi.", "src_lang": "English", "to": "German", "n": 3}
    columns = {"src_text": "source", "tgt_lang": "to", "id": "n"}
    (example,) = load_examples(write(tmp_path / "a.jsonl", row), columns=columns)
    assert (example.id, example.src_text, example.tgt_lang) == ("3", "Hi.", "German")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "src_text": " "}, "a.jsonl line 2: src_text: missing or empty"),
        ({"src_text": "x", "src_lang": "English"}, "line 2: tgt_lang: missing"),
        ({**ROW, "src_text": 5}, "line 2: src_text: expected a text, not int"),
        ({**ROW, "ref_text": ["x"]}, "line 2: ref_text: expected a text, not list"),
        ({**ROW, "src_text": "\ud800"}, "a.jsonl, line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ("{", "line 2: not JSON: EOF while parsing"),
        ("[" * 100_000, "line 2: not JSON: recursion limit"),
        ({**ROW, "id": 1.5}, "line 2: id: expected a text or whole number, not 1.5"),
        ({**ROW, "id": True}, "line 2: id: expected a text or whole number"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_examples(write(tmp_path / "a.jsonl", ROW, row))
    assert "a.jsonl: 1 of 2 rows cannot be used:" in str(error.value)
    assert message in error.value.lines[0]


def test_all_bad_rows_are_listed_the_first_twenty_by_name(tmp_path: Path) -> None:
    rows = [ROW, *({"id": k, "src_text": ""} for k in range(30))]
    path = write(tmp_path / "a.jsonl", *rows)
    path.write_text(path.read_text() + "\n{no JSON\n")
    with pytest.raises(UserError, match="31 of 32 rows cannot be used") as error:
        load_examples(path)
    assert len(error.value.lines) == 21
    assert error.value.lines[-1] == "and 11 more"
    with pytest.raises(UserError, match="1 of 2 rows cannot be used") as error:
        path.write_text(path.read_text().splitlines()[0] + "\n{no JSON\n")
        load_examples(path)
    assert "a.jsonl, line 2: not JSON" in error.value.lines[0]


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b"\xe4\xff")
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    for source, split, message in (
        ("nothing.jsonl", None, "no such file"),
        (str(tmp_path / "gone"), None, "no such file or folder"),
        (str(tmp_path / "latin.jsonl"), None, "line 1: not UTF-8 text"),
        (str(tmp_path / "bad.parquet"), None, "not Parquet"),
        (str(tmp_path / "empty.jsonl"), None, "no rows"),
        (str(tmp_path / "empty.jsonl"), "dev", "no split"),
        (str(tmp_path / "folder"), None, "name the split"),
        (str(tmp_path / "folder"), "dev", "has no dev.jsonl"),
    ):
        with pytest.raises(UserError) as error:
            load_examples(source, split=split)
        assert message in "\n".join([str(error.value), *error.value.lines])
    with pytest.raises(UserError, match="unknown field 'source'"):
        load_examples(tmp_path / "empty.jsonl", columns={"source": "x"})


def test_the_prompt_is_the_preferred_one_to_the_byte() -> None:
    """Compare with TranslateGemma (arXiv 2601.09012, Fig. 3), one blank line before the text."""
    example = Example("a", "Open it.\n", "English", "Klingon", "en-US", "Klingon")
    assert format_translation_prompt(example) == (
        "You are a professional English (en-US) to Klingon (Klingon) translator. Your goal is to "
        "accurately convey the meaning and nuances of the original English text while adhering to "
        "Klingon grammar, vocabulary, and cultural sensitivities. Produce only the Klingon "
        "translation, without any additional explanations or commentary. Please translate the "
        "following English text into Klingon:\n\nOpen it.\n"
    )


def test_the_prompt_is_filled_once() -> None:
    example = Example("a", "Open {target_lang}", "English", "Korean", "en-US", "ko-KR")
    prompt = format_translation_prompt(example)
    assert prompt.startswith("You are a professional English (en-US) to Korean (ko-KR) translator.")
    assert prompt.endswith("English text into Korean:\n\nOpen {target_lang}")
    assert format_translation_prompt(example, "source") == "Open {target_lang}"


def test_postprocessing_only_strips() -> None:
    assert postprocess_translation(' \n그  집은 "빨갛다"\t') == '그  집은 "빨갛다"'


def test_rows_that_are_held_out_and_learned_from_are_told_by_their_content() -> None:
    train = [example("Open.", "1"), example("Save.", "2")]
    german = Example("3", "Save.", "English", "German", "en-US", "de-DE")
    held_out = [example(" Open.\n", "9"), example("Close.", "1"), german]
    message = in_both("data.eval", train, held_out)
    assert message.startswith("data.eval: 1 of 3 rows are also in data.train (the same source")
    assert "first 9)" in message
    assert in_both("data.eval", train, held_out[1:]) == ""


def test_an_example_needs_no_more_than_its_four_required_fields() -> None:
    bare = Example(7, "Open it.", "English", "Korean")  # type: ignore[arg-type]
    assert bare == Example("7", "Open it.", "English", "Korean", "en-US", "ko-KR", None)
    unknown = Example("8", "Open it.", "English", "Klingon of Mars", src_lang_code="en-GB")
    assert (unknown.src_lang_code, unknown.tgt_lang_code) == ("en-GB", "Klingon of Mars")
    prompt = format_translation_prompt(bare)
    assert prompt.startswith("You are a professional English (en-US) to Korean (ko-KR) translator.")


def test_a_bare_example_is_what_the_same_row_of_a_file_gives(tmp_path: Path) -> None:
    for src_lang, tgt_lang in (("English", "Korean"), ("German", "Nahuatl?"), ("ENGLISH", "Thai")):
        row = {"id": 3, "src_text": "Open it.", "src_lang": src_lang, "tgt_lang": tgt_lang}
        assert load_examples(write(tmp_path / "a.jsonl", row)) == [Example(**row)]


@pytest.mark.parametrize("name", ["src_text", "src_lang", "tgt_lang"])
def test_an_example_without_a_text_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"^Example 'a': {name}: a text is required$"):
        Example(**{**ROW, name: None})


def test_bad_rows_are_skipped_counted_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [ROW, *({"id": k, "src_text": ""} for k in range(30)), "{no JSON", {**ROW, "id": "z"}]
    path = write(tmp_path / "a.jsonl", *rows)
    examples = load_examples(path, bad_rows="skip")
    assert [example.id for example in examples] == ["a", "z"]
    summary, *lines = [record.getMessage() for record in caplog.records]
    assert summary == f"{path}: 31 of 33 rows cannot be used, and are left out (data.bad_rows):"
    assert len(lines) == 21 and lines[-1] == "and 11 more"
    assert lines[0].startswith(f"{path} line 2: ")


def test_a_file_of_bad_rows_alone_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{no JSON", {"src_text": 1})
    with pytest.raises(UserError, match="2 of 2 rows cannot be used:") as error:
        load_examples(path, bad_rows="skip")
    assert len(error.value.lines) == 2


def test_the_config_skips_bad_rows_of_both_parts(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", ROW, {"src_text": 3}))
    data = {"train": path, "eval": path}
    cfg = check_config(TranslationConfig, {"data": data}, "test")
    for load in (load_train, load_held_out):
        with pytest.raises(UserError, match="1 of 2 rows cannot be used"):
            load(cfg)
    cfg = check_config(TranslationConfig, {"data": data | {"bad_rows": "skip"}}, "test")
    assert [example.id for example in load_train(cfg)] == ["a"]
    assert [example.id for example in load_held_out(cfg)["eval"]] == ["a"]
