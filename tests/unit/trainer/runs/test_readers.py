"""Check that every file and folder format gives the same examples, and that errors name rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from scorekit.errors import UserError
from trainer.runs.readers import _dataset_rows
from trainer.translation.data import load_examples

ROWS = [
    {
        "id": "a",
        "src_text": 'Say "hi", now',
        "src_lang": "English",
        "tgt_lang": "Korean",
        "ref_text": "안녕",
    },
    {"id": "b", "src_text": "Open it.", "src_lang": "en", "tgt_lang": "ko", "ref_text": None},
    {"id": "c", "src_text": "Save  it.", "src_lang": "en", "tgt_lang": "ko", "ref_text": "저장"},
]


def as_jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_array(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=2, ensure_ascii=False)


def as_tsv(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *([value or "" for value in row.values()] for row in rows)]
    return "".join("\t".join(cells) + "\n" for cells in lines)


def as_csv(rows: list[dict[str, Any]]) -> str:
    quoted = [
        [f'"{(value or "").replace(chr(34), chr(34) * 2)}"' for value in row.values()]
        for row in rows
    ]
    return "".join(",".join(cells) + "\r\n" for cells in [list(rows[0]), *quoted])


def as_quoted_tsv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), dialect="excel-tab", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def expected(tmp_path: Path) -> Any:
    (tmp_path / "expected.jsonl").write_text(as_jsonl(ROWS), encoding="utf-8")
    return load_examples(tmp_path / "expected.jsonl")


FORMS = [
    ("jsonl", as_jsonl),
    ("json", as_array),
    ("json", as_jsonl),
    ("csv", as_csv),
    ("tsv", as_tsv),
    ("tsv", as_quoted_tsv),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(("ending", "form"), FORMS)
def test_every_form_gives_the_same_examples(
    expected: Any,
    tmp_path: Path,
    ending: str,
    form: Callable[..., str],
    mark: str,
    compressed: bool,
) -> None:
    """Check files and folder splits, with and without byte order mark and compression."""
    data = (mark + form(ROWS)).encode()
    path = tmp_path / "folder" / f"dev.{ending}{'.gz' if compressed else ''}"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(data) if compressed else data)
    assert load_examples(path) == expected
    assert load_examples(path.parent, split="dev", limit=2) == expected[:2]
    assert load_examples(path.parent) == expected


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["train/0000.parquet", "train/0001.parquet"],
        ["train/part-9.parquet", "train/part-10.parquet"],
    ],
)
def test_shards_are_one_split_in_the_order_of_their_numbers(
    expected: Any, tmp_path: Path, names: list[str]
) -> None:
    for name, rows in zip(names, (ROWS[:2], ROWS[2:]), strict=True):
        write_parquet(tmp_path / "d" / name, rows)
    assert load_examples(tmp_path / "d", split="train") == expected
    if "/" not in names[0] or names[0].startswith("data/"):
        assert load_examples(tmp_path / "d") == expected
        write_parquet(tmp_path / "d/test-00000-of-00001.parquet", ROWS[:1])
        with pytest.raises(UserError, match=r"name the split of this folder .* test, train"):
            load_examples(tmp_path / "d")
        assert load_examples(tmp_path / "d", split="train") == expected
        (tmp_path / "d" / names[1]).unlink()
        with pytest.raises(UserError, match="1 of 2 shards exist"):
            load_examples(tmp_path / "d", split="train")
    else:
        assert load_examples(tmp_path / "d/train") == expected


def test_a_name_that_ends_in_a_number_is_a_split_of_its_own(tmp_path: Path) -> None:
    for year, row in (("2023", ROWS[0]), ("2024", ROWS[1])):
        (tmp_path / f"wmt-{year}.jsonl").write_text(as_jsonl([row]), encoding="utf-8")
    (example,) = load_examples(tmp_path, split="wmt-2024")
    assert example.id == "b"


def test_a_configuration_of_a_dataset(
    expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a local copy of a hub dataset with two configurations, and a dataset without any."""
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    write_parquet(folder / "ko/train.parquet", ROWS)
    write_parquet(folder / "de/train.parquet", ROWS[:1])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en-ko\n  data_files: ko/train.parquet\n"
        "- config_name: en-de\n  data_files: de/train.parquet\n---\n"
    )
    assert load_examples(folder, split="train", name="en-ko") == expected
    assert load_examples(folder, name="en-de") == expected[:1]
    with pytest.raises(UserError, match="fr"):
        load_examples(folder, name="en-fr")
    with pytest.raises(UserError, match="a single file has no configuration 'x'"):
        load_examples(folder / "ko/train.parquet", name="x")


def test_nested_translations_and_constant_languages(tmp_path: Path) -> None:
    """Check the format of WMT and OPUS: language codes in the configuration or the row."""
    path = tmp_path / "a.jsonl"
    texts = {"translation": {"en": "Open it.", "ko_KR": "여십시오.", "de": "Öffnen."}}
    path.write_text(as_jsonl([texts, {**texts, "tgt_lang": "de"}]), encoding="utf-8")
    first, second = load_examples(path, src_lang="English", tgt_lang="Korean")
    assert (first.src_text, first.ref_text, first.tgt_lang_code) == (
        "Open it.",
        "여십시오.",
        "ko-KR",
    )
    assert (second.tgt_lang, second.ref_text) == ("German", "Öffnen.")
    (other, _) = load_examples(path, src_lang="ko", tgt_lang="ja")
    assert (other.src_text, other.ref_text, other.tgt_lang) == ("여십시오.", None, "Japanese")
    columns = {"src_text": "translation.de", "ref_text": "translation.en"}
    (named, _) = load_examples(path, src_lang="de", tgt_lang="en", columns=columns)
    assert (named.src_text, named.ref_text, named.src_lang_code) == ("Öffnen.", "Open it.", "de-DE")
    parquet = write_parquet(tmp_path / "a.parquet", [texts])
    assert load_examples(parquet, src_lang="en", tgt_lang="ko")[0].ref_text == "여십시오."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            'src_text,src_lang\n"x,y\n',
            "a.csv, line 2: a quote opens a cell in this row, and none closes it",
        ),
        ("a.csv", "src_text,src_lang\nx,en,ko\n", "a.csv, line 2: 3 columns, the header has 2"),
        ("a.csv", "a,a\nx,y\n", "a.csv, line 1: the header has 2 columns 'a'. Rename"),
        (
            "a.csv",
            "text,src_lang,tgt_lang\n\nx,en,ko\n",
            "a.csv line 3: src_text: missing or empty (the row has text, src_lang, tgt_lang)",
        ),
        ("a.tsv", "src_text\tsrc_lang\nx\n", "a.tsv, line 2: 1 columns, the header has 2"),
        ("a.json", "[{]", "a.json: not JSON: "),
        (
            "a.json",
            '[{"src_text": "x", "src_lang": "en", "tgt_lang": "ko"}, 5]',
            "a.json, entry 2: not a JSON object",
        ),
        ("a.jsonl.gz", "plain", "a.jsonl.gz, line 1: not JSON"),
        (
            "a.jsonl",
            '{"translation": {"en": "x", "ko": "y"}}',
            "line 1: translation: has en, ko. Set data.src_lang and data.tgt_lang",
        ),
        (
            "a.jsonl",
            '{"src_lang": "en", "tgt_lang": "ko", "translation": {"en": 5}}',
            "line 1: translation.en: expected a text, not int",
        ),
    ],
)
def test_a_fault_names_file_and_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_examples(tmp_path / name)
    assert message in "\n".join([str(error.value), *error.value.lines])


def test_a_compressed_file_that_is_cut(tmp_path: Path) -> None:
    compressed = gzip.compress(as_jsonl(ROWS * 50).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: the gzip is damaged"):
        load_examples(tmp_path / "a.jsonl.gz")


def test_csv_is_what_python_writes(expected: Any, tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    assert load_examples(tmp_path / "a.csv") == expected


def test_a_dataset_that_datasets_cannot_build_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/train.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match="neither a file, a folder nor a dataset"):
        list(_dataset_rows(str(tmp_path / "d"), None, None, on_disk=False))
