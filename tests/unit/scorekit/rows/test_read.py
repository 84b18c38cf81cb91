"""Check TSV files with quotes, as programs write them, and without, as people do."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.rows.read import RowFile
from scorekit.rows.tsv import Tsv

#: Cells with the characters that make a program quote a cell.
CELLS = st.lists(
    st.sampled_from(["a", "b c", "\t", '"', '""', "\n", "\r\n", "\r", "\0", "😀", ",", "\ufeff"]),
    max_size=6,
).map("".join)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5)


def read(path: Path, content: str | bytes, format=None) -> list[tuple[int, list[str]]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = RowFile(path, format).rows(("src", "mt"), None)
    return [(number, list(fields.values())) for number, fields, _ in rows]


def tsv(tmp_path: Path, content: str | bytes) -> list[list[str]]:
    return [cells for _, cells in read(tmp_path / "in.tsv", content)]


def written(rows, **options) -> str:
    text = io.StringIO()
    csv.writer(text, "excel-tab", **options).writerows([("src", "mt", "ref"), *rows])
    return text.getvalue()


def not_blank(rows) -> list[list[str]]:
    """Return the rows that are not skipped."""
    return [list(row) for row in rows if any(cell.strip() for cell in row)]


@given(ROWS)
def test_what_quotes_every_cell_is_read_as_it_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows")
    for end in ("\n", "\r\n"):
        content = written(rows, quoting=csv.QUOTE_ALL, lineterminator=end)
        assert tsv(path, content) == not_blank(rows)
        assert tsv(path, gzip.compress(b"\xef\xbb\xbf" + content.encode())) == not_blank(rows)


@given(ROWS)
def test_what_quotes_where_it_must_is_read_as_written_or_refused(tmp_path_factory, rows):
    try:
        rows_read = tsv(tmp_path_factory.mktemp("rows"), written(rows))
    except UserError as error:  # cells that look like whole rows: with tabs and line ends
        assert "each of these lines is a row" in str(error)
        assert any("\t" in text and "\n" in text for text in map("".join, rows))
    else:
        assert rows_read == not_blank(rows)


def test_a_data_frame_that_pandas_wrote(tmp_path):
    frame = pd.DataFrame(
        {
            "src": ['Say "hi"', '"Why?"', "two\nlines", "a\tb", "plain", "x" * 200_000 + '"'],
            "mt": ["one", "둘\r\n셋", '"', '""', "", "y"],
        }
    )
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC):
        frame.to_csv(tmp_path / "in.tsv", sep="\t", index=False, quoting=quoting)
        content = (tmp_path / "in.tsv").read_bytes()
        assert tsv(tmp_path, content) == frame.to_numpy().tolist()


@pytest.mark.parametrize(
    "cell",
    ['"', 'a"b', '5" pipe', '"Hi," he said', 'he said "no"', '"a" and "b"', '"open', '""a', 'a""'],
)
def test_a_quote_that_closes_no_cell_is_text(tmp_path, cell):
    """Check quotes in the first and last column, inside the file and at its end."""
    both = [([cell, "b"], ["a", cell]), ([cell, cell],)] if cell != '"' else []  # these close it
    for rows in *both, ([cell, "b"],), (["a", cell],):
        content = "".join("\t".join(row) + "\n" for row in [["src", "mt"], *rows, ["c", "d"]])
        assert tsv(tmp_path, content) == [*rows, ["c", "d"]]
        assert tsv(tmp_path, content[: -len("c\td\n")]) == list(rows)


def test_a_long_header_is_not_shown_whole(tmp_path):
    header = "\t".join(f"column {n} {'x' * 1000}" for n in range(500))
    with pytest.raises(UserError, match="no column 'src', but 'column 0 x") as failed:
        tsv(tmp_path, f"{header}\n")
    assert len(str(failed.value)) < 1000


def test_a_row_is_named_by_the_line_that_it_begins_on(tmp_path):
    content = 'src\tmt\r\n\r\n"a\r\n\r\nb"\t"c\r\nd"\r\n \r\ne\tf\r\n'
    rows_read = read(tmp_path / "in.tsv", content)
    assert rows_read == [(3, ["a\r\n\r\nb", "c\r\nd"]), (8, ["e", "f"])]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\tsrc\tmt\n1\ta\tb\n\t \t\n\n\t\t\n2\tc\t\n\t\n"),
        ("a.tsv", 'id\tsrc\tmt\n1\ta\tb\n""\t""\t" "\n2\tc\t\n \t \t\u3000\n\t\t\n'),
        ("a.csv", "id,src,mt\n1,a,b\n,,\n\n2,c,\n , ,\n,\n"),
        (
            "a.jsonl",
            '{"id":"1","src":"a","mt":"b"}\n\n{}\n{"src":""}\n{"id":"2","src":"c","mt":""}\n{"x":null}',
        ),
        (
            "a.json",
            '[{"id":"1","src":"a","mt":"b"},{},{"src":""},{"id":"2","src":"c","mt":""},{"x":null}]',
        ),
    ],
)
def test_blank_rows_are_skipped_and_counted(tmp_path, name, content, caplog):
    """A row with an id, or with a source alone, is none of them; empty lines are not counted."""
    (tmp_path / name).write_text(content)
    file = RowFile(tmp_path / name)
    for _ in range(2):
        rows = [row.fields for row in file.rows((), None)]
        assert rows == [
            {"id": "1", "src": "a", "mt": "b"},
            {"id": "2", "src": "c", "mt": ""},
        ]
        assert file.blank == 3
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / name}: blank rows are skipped: 3"
    ]


@pytest.mark.parametrize(
    ("content", "needed", "rows"),
    [
        ("src,mt\na,b;c\n", ("src", "mt"), [{"src": "a", "mt": "b;c"}]),
        ("src;mt\na,x;b\n", ("src", "mt"), [{"src": "a,x", "mt": "b"}]),
        ("src\tmt\na,x\tb\n", ("src", "mt"), [{"src": "a,x", "mt": "b"}]),
        ("SRC;Mt\na;b\n", ("src", "mt"), [{"src": "a", "mt": "b"}]),
        ('"src";"mt"\n"a;""x""";b\n', ("src", "mt"), [{"src": 'a;"x"', "mt": "b"}]),
        ("text;n\na,b,c;1\n", (), [{"text": "a,b,c", "n": "1"}]),
        ("sep=;\nsrc;mt,n\na;b,c\n", ("src",), [{"src": "a", "mt,n": "b,c"}]),
        ('"sep=,"\r\nsrc,mt\r\na;b,\r\n', ("src", "mt"), [{"src": "a;b", "mt": ""}]),
        ("sep=|\nsrc|mt\na|b\n", ("src", "mt"), [{"src": "a", "mt": "b"}]),
        ("src;mt\nsep=;\n", ("src",), [{"src": "sep=", "mt": ""}]),
        ("text\na;b\n", (), [{"text": "a;b"}]),
        ("a,b;c\n1,2;3\n", (), [{"a": "1", "b;c": "2;3"}]),
        ('a,"b;c;d"\n1,2\n', (), [{"a": "1", "b;c;d": "2"}]),
    ],
)
def test_the_header_of_a_csv_decides_its_separator(tmp_path, content, needed, rows):
    path = tmp_path / "in.csv"
    for written_content in (content.encode(), b"\xef\xbb\xbf" + content.encode()):
        for name, raw in (
            ("in.csv", written_content),
            ("in.csv.gz", gzip.compress(written_content)),
        ):
            path = tmp_path / name
            path.write_bytes(raw)
            assert [row.fields for row in RowFile(path).rows(needed, None)] == rows


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (" src \tmt", ["src", "mt"]),
        ("Src\tMT", ["src", "mt"]),
        ("Src\tsrc\tmt", ["Src", "src", "mt"]),
    ],
)
def test_names_of_columns_are_stripped_and_may_differ_in_case(tmp_path, header, names):
    cells = [str(k) for k in range(len(names))]
    (tmp_path / "in.tsv").write_text(f"{header}\n" + "\t".join(cells) + "\n")
    (row,) = RowFile(tmp_path / "in.tsv").rows(("src", "mt"), None)
    assert row.fields == dict(zip(names, cells, strict=True))


def test_two_columns_that_differ_in_case_alone_are_none_that_is_asked_for(tmp_path):
    with pytest.raises(UserError, match=r"has no column 'src', but 'Src', 'SRC', 'mt'"):
        tsv(tmp_path, "Src\tSRC\tmt\na\tb\tc\n")


KOREAN = "src,mt\n원문,집은 파란색이다.\n둘,번역문입니다\n"


@pytest.mark.parametrize(
    ("encoding", "format"),
    [("utf-16", None), ("utf-16", "jsonl"), ("utf-8-sig", None), ("cp949", None)],
)
def test_encodings_that_can_be_told_are_told(tmp_path, encoding, format, caplog):
    content = '{"src": "원문"}\n' if format else KOREAN
    path = tmp_path / ("in.jsonl" if format else "in.csv")
    path.write_bytes(content.encode(encoding))
    first = next(RowFile(path).rows((), None))
    assert first.fields["src"] == "원문"
    assert ("is read as cp949" in caplog.text) == (encoding == "cp949")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("src,mt\nÄpfel,apples\n", "cp1252"),
        ("src,mt\nLes élèves,pupils\n", "cp1252"),
        ("src,mt\n这是一个句子，没有别的。,a sentence\n", "gbk"),
        ("src,mt\n這是一個句子,a sentence\n", "big5"),
        ("src,mt\nこれはペンです。,a pen\n", "shift_jis"),
        ("src,mt\nЭто предложение,a sentence\n", "cp1251"),
    ],
)
def test_other_encodings_are_refused_until_they_are_named(tmp_path, text, encoding):
    path = tmp_path / "in.csv"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(
        UserError, match=r"line 2: not UTF-8 text\. Save the file as UTF-8, or name"
    ):
        list(RowFile(path).rows((), None))
    (row,) = RowFile(path, encoding=encoding).rows((), None)
    assert row.fields["src"] == text.splitlines()[1].split(",")[0]


@pytest.mark.parametrize("name", ["klingon", "base64", "undefined"])
def test_what_is_no_encoding_of_texts_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"--encoding {name}: no encoding of texts has that name"):
        RowFile(tmp_path / "in.csv", encoding=name)


def test_an_encoding_has_one_name(tmp_path):
    (tmp_path / "in.csv").write_text("src\na\n")
    assert RowFile(tmp_path / "in.csv", encoding="UTF8").encoding == "utf-8"
    assert RowFile(tmp_path / "in.csv").encoding == "utf-8"


@pytest.mark.parametrize(
    ("name", "content", "problems"),
    [
        (
            "a.jsonl",
            b'{"a":1}\n[1]\n{"b"\n\xff\n{"a":2}\n',
            {2: "not a JSON object", 3: "not JSON", 4: "not UTF-8"},
        ),
        ("a.json", b'[{"a":1},[1],"x",{"a":2}]', {2: "not a JSON object", 3: "not a JSON object"}),
        (
            "a.csv",
            b'a,b\n1,2\n3\n\xff,4\n1,"x" y\n5,6\n',
            {3: "1 columns", 4: "not UTF-8", 5: "expected"},
        ),
        (
            "a.tsv",
            b'a\tb\n1\t2\n3\n\xff\t4\n"\n\xff"\t2\n5\t6\n',
            {3: "1 columns", 4: "not UTF-8", 6: "not UTF-8"},
        ),
    ],
)
def test_rows_that_cannot_be_used_can_be_listed(tmp_path, name, content, problems):
    (tmp_path / name).write_bytes(content)
    rows = list(RowFile(tmp_path / name).rows((), None, with_bad=True))
    problem_of = {row.number: row.problem for row in rows if row.problem}
    assert list(problem_of) == list(problems)
    for number, words in problems.items():
        assert words in problem_of[number]
    assert [row.problem for row in (rows[0], rows[-1])] == ["", ""]


def test_a_text_file_has_a_text_a_line(tmp_path):
    (tmp_path / "a.txt").write_text('one\ttab\n\n"two" \r\n', newline="")
    rows = list(RowFile(tmp_path / "a.txt").rows((), None))
    assert rows == [(1, {"text": "one\ttab"}, ""), (3, {"text": '"two" '}, "")]


QUOTATION = 'src\tmt\n"It rains\tEs regnet\nand pours"\tund gießt\n'


def test_a_quotation_over_two_rows_is_not_taken_for_a_cell(tmp_path):
    """Check an ambiguous quotation: the error names the lines and both solutions."""
    reason = "line 2: a quote opens here and closes on line 3, and each of these lines is a row"
    with pytest.raises(UserError, match=reason):
        tsv(tmp_path, QUOTATION)
    rows = [["It rains\tEs regnet\nand pours", "und gießt"]]
    assert tsv(tmp_path, QUOTATION.replace("src\tmt", '"src"\t"mt"')) == rows
    unquoted = [(2, ['"It rains', "Es regnet"]), (3, ['and pours"', "und gießt"])]
    assert read(tmp_path / "in.tsv", QUOTATION, "tsv-unquoted") == unquoted


def test_a_file_that_mixes_quoted_cells_and_quotes_warns_once(tmp_path, caplog):
    path = tmp_path / "in.tsv"
    path.write_text('src\tmt\n"Why?"\t"Warum?"\n"Hi," he said\tx\n')
    file = RowFile(path)
    for _ in range(2):
        rows = [row.fields for row in file.rows(("src", "mt"), None)]
    assert rows == [{"src": "Why?", "mt": "Warum?"}, {"src": '"Hi," he said', "mt": "x"}]
    (record,) = caplog.records
    assert f"{path}: 2 cells are quoted" in record.message
    assert "1 hold quotes as text" in record.message
    caplog.clear()
    assert len(read(path, 'src\tmt\n"a ""b"""\tc\n')) == len(read(path, 'src\tmt\na "b"\tc\n')) == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'src\tmt\n"a\nb"\tc\nd\n', "line 4: 1 columns, the header has 2"),
        (b'src\tmt\n"a\nb\xff"\tc\n', "line 3: not UTF-8 text"),
        (b'"src"\t"src"\na\tb\n', "line 1: the header has 2 columns 'src'. Rename"),
    ],
)
def test_a_fault_names_its_line(tmp_path, content, reason):
    with pytest.raises(UserError, match=reason):
        tsv(tmp_path, content)


def test_many_quotes_that_nothing_closes_are_text(tmp_path):
    lines = [f'"open {k}\t""{k}"" and "more' for k in range(20_000)]
    rows_read = tsv(tmp_path, "\n".join(["src\tmt", *lines]))
    assert rows_read == [line.split("\t") for line in lines]


@pytest.mark.parametrize("format", ["jsonl", "tsv", "tsv-unquoted"])
def test_a_small_gzip_with_a_huge_line_is_refused(format, tmp_path, monkeypatch):
    monkeypatch.setattr("scorekit.rows.tsv.MAX_LINE_BYTES", 2**20)
    path = tmp_path / "rows.gz"
    path.write_bytes(gzip.compress(b"{}\n" + b" " * 2**25))
    assert path.stat().st_size < 2**16
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="line 2: longer than 1,048,576 bytes"):
            list(RowFile(path, format).rows((), None))
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_damaged_line_is_forgotten_with_its_row():
    """Many of them would otherwise be looked through for every row."""
    tsv = Tsv(io.BytesIO(b"a\tb\n" + b"\xff\tb\n" * 9 + b'"\xff\n\xff"\tb\n'))
    for _, _, _ in tsv.records():
        assert not tsv._damaged
