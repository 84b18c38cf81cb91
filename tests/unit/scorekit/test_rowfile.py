"""Check TSV files with quotes, as programs write them, and without, as people do."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.rowfile import RowFile

#: Cells with the characters that make a program quote a cell.
CELLS = st.lists(
    st.sampled_from(["a", "b c", "\t", '"', '""', "\n", "\r\n", "\r", "\0", "😀", ",", "\ufeff"]),
    max_size=6,
).map("".join)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5)


def read(path: Path, content: str | bytes, format=None) -> list[tuple[int, list[str]]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = RowFile(path, format).rows(("src", "mt"), None)
    return [(number, list(fields.values())) for number, fields in rows]


def tsv(tmp_path: Path, content: str | bytes) -> list[list[str]]:
    return [cells for _, cells in read(tmp_path / "in.tsv", content)]


def written(rows, **options) -> str:
    text = io.StringIO()
    csv.writer(text, "excel-tab", **options).writerows([("src", "mt", "ref"), *rows])
    return text.getvalue()


@given(ROWS)
def test_what_quotes_every_cell_is_read_as_it_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows")
    for end in ("\n", "\r\n"):
        content = written(rows, quoting=csv.QUOTE_ALL, lineterminator=end)
        assert tsv(path, content) == [list(row) for row in rows]
        assert tsv(path, gzip.compress(b"\xef\xbb\xbf" + content.encode())) == list(map(list, rows))


@given(ROWS)
def test_what_quotes_where_it_must_is_read_as_written_or_refused(tmp_path_factory, rows):
    try:
        rows_read = tsv(tmp_path_factory.mktemp("rows"), written(rows))
    except UserError as error:  # cells that look like whole rows: with tabs and line ends
        assert "each of these lines is a row" in str(error)
        assert any("\t" in text and "\n" in text for text in map("".join, rows))
    else:
        assert rows_read == [list(row) for row in rows]


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


def test_a_row_of_empty_cells_is_a_row(tmp_path):
    assert tsv(tmp_path, "src\tmt\na\tb\n\t\n\n") == [["a", "b"], ["", ""]]


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
