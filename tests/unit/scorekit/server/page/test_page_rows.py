"""Check what the page's rows are: the samples of `scorekit score`, and what is said of them."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.rows.samples import SampleFile
from scorekit.server.page.rows import MAX_ROWS, read_rows
from tests.kits.examples import examples

awkward = st.lists(
    st.sampled_from(["a", "\t", '"', "\n", "\r\n", "😀", "한", "=", ",", ";", "'", " "]), max_size=8
).map("".join)


def samples(answer) -> list[dict]:
    return [row["sample"] for row in answer["rows"]]


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(awkward, awkward, awkward), min_size=1, max_size=4),
    st.sampled_from(["in.tsv", "in.csv"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONE]),
)
@example([("1", 'a"', '"b')], "in.tsv", csv.QUOTE_NONE)
def test_the_rows_are_those_of_the_command(tmp_path_factory, rows, name, quoting):
    text = io.StringIO()
    separator = "\t" if name.endswith("tsv") else ";"
    table = [("id", "src", "mt"), *rows]
    if quoting == csv.QUOTE_NONE:
        text.write("\n".join(separator.join(row) for row in table))
    else:
        csv.writer(text, delimiter=separator, quoting=quoting).writerows(table)
    content = text.getvalue().encode()
    path = tmp_path_factory.mktemp("rows") / name
    path.write_bytes(content)
    answer = read_rows(name, content)
    file = SampleFile(path, bad_rows="skip")
    try:
        lines = list(file.lines())
    except UserError as error:
        assert answer["problem"] == str(error).replace(str(path), name)
        return
    if answer["problem"]:
        assert all(line.problem for line in lines)
        return
    expected = [
        {"line": line.number, "id": line.id}
        | ({"problem": line.problem} if line.problem else {"sample": line.sample})
        for line in lines
    ]
    assert answer["rows"] == expected
    assert answer["blank"] == file.file.blank
    assert answer["bad"] == sum(bool(line.problem) for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("", "id\tsrc\tmt\n1\ta\tb\n", "tsv"),
        ("", "\n\nsrc;mt\na;b\n", "csv"),
        ("", '{"src": "a", "mt": "b"}\n', "jsonl"),
        ("", '\ufeff [\n{"src": "a", "mt": "b"}]', "json"),
        ("in.txt", "src\tmt\r\na\tb\r\n", "tsv"),
        ("IN.TXT", "src,mt\na,b", "csv"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_what_has_no_ending_is_told_by_its_first_line(name, content, format, encoding):
    answer = read_rows(name, content.encode(encoding))
    assert (answer["problem"], answer["format"]) == ("", format)
    assert samples(answer) == [{"src": "a", "mt": "b"}]


def test_the_columns_that_are_taken_are_told():
    answer = read_rows("a.csv", b"ID,Src,MT,note\n1,a,b,c\n")
    assert answer["columns"] == {"src": "Src", "mt": "MT", "ref": None, "id": "ID"}
    assert answer["names"] == ["ID", "Src", "MT", "note"] and answer["likely"] == {}
    answer = read_rows("a.jsonl", b'{"src": "a", "mt": "b"}\n{"src": "a", "mt": "b", "ref": "c"}\n')
    assert answer["columns"] == {"src": "src", "mt": "mt", "ref": "ref", "id": None}


def test_likely_names_are_told_and_not_taken():
    answer = read_rows("a.csv", "원문;번역문\n안녕;hello\n".encode("cp949"))
    assert answer["likely"] == {"src": "원문", "mt": "번역문"} and answer["rows"] == []
    assert answer["problem"].endswith("; perhaps src is '원문' and mt is '번역문'")
    assert answer["columns"]["src"] is None
    assert [note for note in answer["notes"] if "cp949" in note]


def test_bad_blank_and_empty_rows_are_counted():
    answer = read_rows("a.csv", b"src,mt,id\na,b,1\n,,\n , ,\nc,,2\nd\n")
    assert (answer["bad"], answer["blank"], answer["empty"]) == (1, 2, 1)
    assert answer["rows"][-1] == {"line": 6, "id": None, "problem": "1 columns, the header has 3"}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.xlsx", b"PK", "a.xlsx: a workbook. Save its sheet as CSV"),
        ("-", b"src\tmt\n", "-: its ending is none of "),
        ("a.parquet", b"PAR1", "a.parquet: this page opens no Parquet and no gzip"),
        ("a.parquet.gz", b"PAR1", "a.parquet.gz: this page opens no Parquet"),
        ("a.csv", b"\x1f\x8bx", "a.csv: this page opens no Parquet and no gzip"),
        ("", b"\x1f\x8bx", "pasted rows: this page opens no Parquet and no gzip"),
        ("a.csv", b"", "a.csv: no rows."),
        ("", b"src\tmt\n\t\n", "pasted rows: no rows."),
        ("a\nb.csv", b"", "a?b.csv: no rows."),
        ("a.csv", b"src,mt\n1\n2\n", "a.csv: no row is a sample:\na.csv, line 2: 1 columns, "),
        ("a.csv", "src,mt\nä,b\n".encode("latin-1"), "a.csv: no row is a sample:\na.csv, line 2: "),
        ("a.json", b"[[", "a.json: not JSON: "),
    ],
)
def test_what_cannot_be_scored_is_said(name, content, problem):
    answer = read_rows(name, content)
    assert answer["problem"].startswith(problem) and answer["rows"] == []


def test_more_rows_than_the_page_takes_are_refused_with_their_number():
    rows = [json.dumps({"src": f"{k}", "mt": "b"}) for k in range(MAX_ROWS + 1)]
    assert len(read_rows("", "\n".join(rows[:-1]).encode())["rows"]) == MAX_ROWS
    problem = read_rows("", "\n".join(rows).encode())["problem"]
    assert problem == "pasted rows: 1,001 rows. This page takes 1,000; `scorekit score` any number"
