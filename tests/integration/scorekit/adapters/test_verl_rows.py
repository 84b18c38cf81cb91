"""Rows of verl's dataset for which no completion could have a reward are refused."""

from __future__ import annotations

import pandas as pd
import pytest

from scorekit.adapters.shared import reward_settings
from scorekit.adapters.verl_run import check_rows
from scorekit.errors import UserError

URL = "http://127.0.0.1:1"
GATED = {
    "components": {"xcomet": {"service": URL}},
    "gates": {"g": {"rule": "language"}},
}


def write(folder, *infos, **columns):
    path = folder / "train.parquet"
    rows = [
        {
            "prompt": [{"role": "user", "content": "Translate: a"}],
            "data_source": "mine",
            "reward_model": {"ground_truth": "가"},
            "extra_info": info,
        }
        for info in infos
    ]
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"definition": GATED}, "gates.g: reads the field 'tgt_lang', and no sample has it"),
        ({"url": URL, "src_key": "source"}, "row 0: no field 'source'; there are: ground_truth"),
        ({"url": URL, "src_pattern": "From: (?P<src>.*)"}, "row 0: the prompt is not passed along"),
        ({"url": URL, "ref_key": "ref"}, "row 0: no field 'ref'"),
        ({"definition": GATED, "tgt_lang": "tlh"}, "gates.g: py3langid does not know"),
    ],
)
def test_rows_without_what_the_reward_reads_are_refused(tmp_path, settings, message):
    path = write(tmp_path, {"src": "a"}, {"src": "b"})
    for key, files in (("train_files", path), ("val_files", [path])):
        with pytest.raises(UserError) as caught:
            check_rows({key: files}, reward_settings(**settings))
        line = str(caught.value)
        assert line.startswith(f"data.{key}: {path}: {message}") and "\n" not in line


def test_rows_with_what_the_reward_reads_pass(tmp_path):
    path = write(tmp_path, {"src": "a", "tgt_lang": "ko"}, {"src": "b", "tgt_lang": None})
    for settings in (
        {"definition": GATED},
        {"definition": GATED, "tgt_lang_key": "tgt_lang"},
        {"url": URL, "ref_key": "ground_truth"},
    ):
        check_rows({"train_files": [path], "val_files": None}, reward_settings(**settings))
    from_prompt = {"url": URL, "src_pattern": "Translate: (?P<src>.*)"}
    check_rows({"train_files": path}, reward_settings(**from_prompt), gets_prompt=True)
    with pytest.raises(UserError, match="row 0: the source cannot be found in the prompt"):
        wrong = reward_settings(url=URL, src_pattern="From: (?P<src>.*)")
        check_rows({"train_files": path}, wrong, gets_prompt=True)


def test_files_that_are_elsewhere_are_left_to_verl_and_a_damaged_one_is_one_line(tmp_path):
    settings = reward_settings(definition=GATED)
    check_rows({"train_files": ["hdfs://a/b.parquet", str(tmp_path / "gone.parquet")]}, settings)
    check_rows({"train_files": str(tmp_path / "rows.jsonl")}, settings)
    path = tmp_path / "damaged.parquet"
    path.write_text("no Parquet")
    with pytest.raises(UserError, match=r"damaged.parquet: cannot be read: .*") as caught:
        check_rows({"train_files": str(path)}, settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reward_model", "extra_info"])
def test_a_column_of_texts_in_place_of_fields_is_refused(tmp_path, name):
    path = tmp_path / "texts.parquet"
    row = {"reward_model": {"ground_truth": "가"}, "extra_info": {"src": "a"}}
    pd.DataFrame([row | {name: '{"src": "a"}'}]).to_parquet(path)
    with pytest.raises(UserError, match=f"row 0: {name} is a str. Write it as a struct"):
        check_rows({"train_files": str(path)}, reward_settings(url=URL, src_key="src"))
