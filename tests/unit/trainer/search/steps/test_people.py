"""Check worksheets that people edit in a spreadsheet."""

from __future__ import annotations

import csv
import io

import pytest

from scorekit.errors import UserError
from trainer.search.steps.worksheet import (
    ID,
    NOTE,
    PERSON,
    agreement_lines,
    csv_text,
    kappa,
    read_people,
)

IDS = ("q1", "q2", "=q3", "'q4", "질문5")


def sheet(rows, head=(ID, PERSON, NOTE), separator=",", encoding="utf-8-sig") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator).writerows([head, *rows])
    return text.getvalue().encode(encoding)


def read(tmp_path, data: bytes):
    path = tmp_path / "worksheet.csv"
    path.write_bytes(data)
    return read_people(path, IDS)[0]


def test_a_csv_opens_as_it_is_meant():
    data = csv_text(["id", "답"], [["q1", "인구 5만"], ["q2", "a\nb,\0c"]])
    assert data.startswith(b"\xef\xbb\xbf")
    assert data.decode("utf-8-sig") == 'id,답\r\nq1,인구 5만\r\nq2,"a␊b,␀c"\r\n'


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-5", "@x", "\tx", "\rx", "＝1", "'x"])
def test_no_cell_is_a_formula(cell):
    (row,) = list(csv.reader(io.StringIO(csv_text(["h"], [[cell]]).decode("utf-8-sig"))))[1:]
    assert row[0].startswith("'")


def test_what_was_written_is_read_back_and_empty_cells_are_nobodys(tmp_path):
    rows = [[row_id, "GT_ERROR", "메모"] for row_id in IDS] + [["", "", ""]]
    labels = read(tmp_path, csv_text([ID, PERSON, NOTE], rows))
    assert {name: (label.truth, label.note) for name, label in labels.items()} == dict.fromkeys(
        IDS, ("GT_ERROR", "메모")
    )
    assert read(tmp_path, csv_text([ID, PERSON], [["q1", " "], ["q2", "ok"]])).keys() == {"q2"}


@pytest.mark.parametrize(
    ("separator", "encoding"),
    [(";", "utf-8"), ("\t", "utf-8-sig"), (",", "cp949"), ("\t", "utf-16")],
)
def test_a_spreadsheet_may_write_it_otherwise(tmp_path, separator, encoding):
    data = sheet([["질문5", "gen error", "맞음"], ["q1", "OK", ""]], (ID, "Person", NOTE))
    path = sheet(
        list(csv.reader(io.StringIO(data.decode("utf-8-sig"))))[1:],
        (ID, "Person", NOTE),
        separator,
        encoding,
    )
    labels = read(tmp_path, path)
    assert {name: label.truth for name, label in labels.items()} == {
        "질문5": "GEN_ERROR",
        "q1": "OK",
    }


def test_a_long_cell_of_another_column_is_read(tmp_path):
    """Check a cell above the csv module's default limit of 131,072 characters."""
    csv.field_size_limit(131_072)
    rows = [["q1", "OK", "쪽" * 200_000]]
    assert read(tmp_path, csv_text([ID, PERSON, "answer"], rows)).keys() == {"q1"}


def test_each_bad_row_is_one_line(tmp_path):
    rows = [["q1", "WRONG"], ["q9", "OK"], ["q2", "OK"], ["q2", "GT_ERROR"]]
    with pytest.raises(UserError, match="3 rows cannot be used") as caught:
        read(tmp_path, sheet(rows, (ID, PERSON)))
    first, second, third = caught.value.lines
    assert first.startswith("line 2: 'WRONG' is not a class: OK, GT_ERROR")
    assert "no row of the data has the id 'q9'" in second and third.startswith(
        "line 5: the id 'q2'"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "worksheet.csv: is empty"),
        (b"id,class\nq1,OK\n", "no column 'person'"),
        (b"id,person,person\nq1,OK,OK\n", "2 columns 'person'"),
        (b"id,person\n\xff\xff\xff,OK\n", "line 2: not UTF-8 text"),
        (b"id,person\nq1,OK\nq2\n", "line 3: 1 columns, the header has 2"),
    ],
)
def test_what_is_no_worksheet_is_one_line(tmp_path, data, message):
    with pytest.raises(UserError, match="--decisions") as caught:
        read(tmp_path, data)
    assert message in "\n".join([str(caught.value), *caught.value.lines])


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv: No such file"):
        read_people(tmp_path / "none.csv", IDS)


def pairs(table: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    return [pair for pair, count in table.items() for _ in range(count)]


def test_kappa_is_that_of_the_closed_form():
    # p_o = 35/50, p_e = (25 * 30 + 25 * 20) / 50**2 = 0.5
    counts = {("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}
    assert kappa(pairs(counts)) == pytest.approx(0.4)
    # three classes: p_o = 6/10, p_e = (4 * 3 + 3 * 4 + 3 * 3) / 100 = 0.33
    three = {("a", "a"): 2, ("b", "b"): 2, ("c", "c"): 2}
    three |= {("a", "b"): 2, ("b", "c"): 1, ("c", "a"): 1}
    assert kappa(pairs(three)) == pytest.approx((0.6 - 0.33) / 0.67)


def test_kappa_at_its_ends():
    assert kappa([("a", "a"), ("b", "b")]) == 1
    assert kappa([("a", "b"), ("b", "a")]) == -1
    assert kappa([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]) == 0
    assert kappa([]) is None and kappa([("a", "a")] * 3) is None


def test_agreement_in_words():
    text = agreement_lines([("a", "a"), ("b", "b"), ("a", "b"), ("b", "b")], "both")
    assert text == "both: 3 of 4 (75.0 %), Cohen's kappa 0.500"
    assert agreement_lines([("a", "a")], "both").endswith("not defined")
