"""Check which rows of awkward files `scorekit score` scores, and what it says of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scorekit.__main__ import app
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_service


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_service(FakeBackend("xcomet")) as url:
        yield url


def scored(url: str, source: Path, *flags: str) -> Result:
    out = source.with_name("out.jsonl")
    return CliRunner().invoke(app, ["score", "--url", url, str(source), str(out), *flags])


def results(source: Path) -> list[dict[str, Any]]:
    lines = source.with_name("out.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def score_of(src: str, mt: str) -> float:
    return fake_score(TranslationSample(src=src, mt=mt), 1.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.csv", "id;src;mt\n7;원문;번역\n".encode()),
        ("in.csv", "id,src,mt\n7,원문,번역\n".encode("cp949")),
        ("in.tsv", "id\tsrc\tmt\n7\t원문\t번역\n".encode("utf-16")),
        ("in.tsv", " ID\tSrc\tMT \n7\t원문\t번역\n".encode()),
        ("in.json", '[{"id": "7", "src": "원문", "mt": "번역"}]'.encode()),
    ],
    ids=["semicolons", "Korean Windows", "Excel's Unicode", "other names", "array"],
)
def test_files_as_programs_save_them_are_scored_by_name(
    url: str, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    result = scored(url, tmp_path / name)
    assert result.exit_code == 0, result.output
    ((row),) = results(tmp_path / name)
    assert (row["id"], row["score"]) == ("7", score_of("원문", "번역"))


def test_an_encoding_that_is_named_is_part_of_what_an_output_is_made_from(
    url: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes("src,mt\n原文,译文\n".encode("gbk"))
    assert "not UTF-8 text" in scored(url, source).output
    assert scored(url, source, "--encoding", "gbk").exit_code == 0
    assert results(source)[0]["score"] == score_of("原文", "译文")
    assert scored(url, source, "--encoding", "gbk").exit_code == 0
    changed = scored(url, source, "--encoding", "gb18030")
    assert changed.exit_code == 2
    assert "was made from something else (encoding)" in changed.output


@pytest.mark.parametrize("blank", ["\t\t\n", ' \t""\t\u3000\n'])
def test_blank_rows_are_not_in_the_mean(url: str, tmp_path: Path, blank: str) -> None:
    """A row with a source alone is a sample; empty lines are counted nowhere."""
    source = tmp_path / "in.tsv"
    source.write_text(f"id\tsrc\tmt\n1\ta\tb\n{blank}\n2\tc\t\n{blank}")
    result = scored(url, source)
    assert result.exit_code == 0
    assert [row["id"] for row in results(source)] == ["1", "2"]
    mean = (score_of("a", "b") + score_of("c", "")) / 2
    assert f"{mean:.4f}" in result.output
    summary = [line for line in result.output.splitlines() if "│" in line]
    assert any("blank rows, skipped" in line and " 2 " in line for line in summary)
    assert any("empty translations" in line and " 1 " in line for line in summary)


def test_an_output_that_has_scores_of_blank_rows_is_not_gone_on_with(
    url: str, tmp_path: Path
) -> None:
    """Without blank rows, what an earlier version has left is gone on with."""
    meta = tmp_path / "out.jsonl.meta.json"
    source = tmp_path / "in.tsv"
    for content, code in (("src\tmt\na\tb\n\n", 0), ("src\tmt\na\tb\n\t\n", 2)):
        source.write_text(content)
        assert scored(url, source, "--overwrite").exit_code == 0
        description = json.loads(meta.read_text())
        description.pop("blank_rows", None)  # an earlier version did not know of them
        meta.write_text(json.dumps(description))
        result = scored(url, source)
        assert result.exit_code == code
    assert "was made from something else (blank_rows)" in result.output


BAD = """\
{"id": 1, "src": "a", "mt": "b"}
{"id": 2, "src": "c"}
[]
{"id": 4, "src": "d", "mt": "e"}
"""


def test_bad_rows_are_listed_together_before_anything_is_asked(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(BAD + "x\n" * 30)
    result = scored(f"http://127.0.0.1:{free_port()}", source)
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert lines[0] == f"error: {source}: 32 of 34 rows are no samples:"
    assert lines[1] == f"{source}, line 2: no field 'mt'"
    assert lines[2] == f"{source}, line 3: not a JSON object"
    assert len(lines) == 22
    assert lines[21] == "and 12 more"


def test_bad_rows_can_be_skipped_and_have_a_line_each(url: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(BAD)
    for _ in range(2):  # the second run has nothing left to do
        result = scored(url, source, "--bad-rows", "skip")
        assert result.exit_code == 0
        rows = results(source)
        assert [(row["line"], row["id"], row["ok"]) for row in rows] == [
            (1, 1, True),
            (2, 2, False),
            (3, None, False),
            (4, 4, True),
        ]
        assert rows[1]["error"]["type"] == "invalid_input"
        assert rows[1]["error"]["message"] == "no field 'mt'"
        assert "failed: invalid_input" in result.output
    source.write_text("[]\n")
    assert "line 1: not a JSON object" in scored(url, source, "--bad-rows", "skip").output


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("in.tsv", "ID\tSource\tTarget\n", "--src-field Source --mt-field Target"),
        ("in.csv", "src;번역 \n", "--mt-field '번역'"),
        ("in.csv", "원문,Hypothesis\n", "--src-field '원문' --mt-field Hypothesis"),
        ("in.jsonl", '{"source": "a", "my mt": "b"}\n', "--src-field source"),
    ],
)
def test_likely_names_are_named_and_not_taken(
    tmp_path: Path, name: str, content: str, hint: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    result = scored(f"http://127.0.0.1:{free_port()}", tmp_path / name)
    assert result.exit_code == 2
    assert result.output.endswith(f"perhaps you mean {hint}\n")
