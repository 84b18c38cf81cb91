"""Check how parallel text files are read as rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.rows.parallel import ParallelFiles


def write(folder: Path, **lines: list[str]) -> dict[str, Path]:
    paths = {}
    for name, texts in lines.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return paths


def test_rows_are_those_of_each_system_in_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path, s=["원문", "", "두\t번", ""], a=["a1", "", "", ""], b=["b1", "b2", "b3", ""]
    )
    files = ParallelFiles(path["s"], [path["a"], path["b"]])
    assert [(row.number, *row.fields.values()) for row in files.rows((), None)] == [
        (1, 1, "원문", "a1", "a"),
        (3, 3, "두\t번", "", "a"),
        (5, 1, "원문", "b1", "b"),
        (6, 2, "", "b2", "b"),
        (7, 3, "두\t번", "b3", "b"),
    ]
    assert files.blank_by_system == {"a": 2, "b": 1} and files.blank == 3
    assert files.location(7) == f"{path['b']}, line 3"


def test_lines_may_end_and_be_packed_and_encoded_in_several_ways(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\x0bc\xc2\x85d")  # no line end at the end
    (tmp_path / "a.de.gz").write_bytes(gzip.compress(b"x\ny\n"))
    (tmp_path / "r.ko").write_bytes("참조 문장\n둘\n".encode("cp949"))
    files = ParallelFiles(tmp_path / "s.txt", [tmp_path / "a.de.gz"], tmp_path / "r.ko")
    assert [tuple(row.fields.values()) for row in files.rows((), None)] == [
        (1, "a", "x", "참조 문장", "a"),
        (2, "b\x0bc\x85d", "y", "둘", "a"),
    ]
    assert files.encoding == "utf-8, utf-8, cp949"


def test_different_numbers_of_lines_are_refused_with_both(tmp_path: Path) -> None:
    path = write(tmp_path, s=["1", "2"], a=["1", "2"], b=["1", "2", ""])
    with pytest.raises(UserError) as error:
        list(ParallelFiles(path["s"], [path["a"], path["b"]]).rows((), None))
    assert str(error.value).startswith(f"{path['s']} has 2 lines, {path['b']} 3: ")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.txt", "x/b.txt"], ["a", "b"]),
        (["x/test.a", "x/test.b"], ["test.a", "test.b"]),
        (["x/out.txt", "y/out.txt"], ["x/out.txt", "y/out.txt"]),
        (["en-ko.v2.txt.gz", "en-ko.v1.txt"], ["en-ko.v2", "en-ko.v1"]),
    ],
)
def test_systems_have_the_shortest_names_that_tell_them_apart(
    paths: list[str], names: list[str]
) -> None:
    assert ParallelFiles(Path("s.txt"), list(map(Path, paths))).systems == names


def test_a_file_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"-t a.txt: this file is named twice"):
        ParallelFiles(Path("s.txt"), [Path("a.txt"), Path("b.txt"), Path("a.txt")])
    with pytest.raises(UserError, match="only one of the parallel files can be stdin"):
        ParallelFiles(Path("-"), [Path("-")])


def test_a_line_that_is_no_text_is_a_problem_of_its_row(tmp_path: Path) -> None:
    path = write(tmp_path, s=["1", "2"])
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfd\n\xe4\n")
    (tmp_path / "b.txt").write_bytes(b"x\n\xe4\n")
    files = ParallelFiles(path["s"], [tmp_path / "b.txt"])
    good, bad = files.rows((), None, with_bad=True)
    assert good.fields["mt"] == "x" and "mt: not UTF-8 text" in bad.problem
    with pytest.raises(UserError, match=r"b\.txt, line 2: mt: not UTF-8 text"):
        list(files.rows((), None))
    with pytest.raises(UserError, match=r"missing\.txt: No such file"):
        list(ParallelFiles(tmp_path / "missing.txt", [path["s"]]).rows((), None))


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=5)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=8))
def test_every_text_is_in_its_row_and_blank_rows_are_counted(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str, str]]
) -> None:
    columns = dict(zip("sab", map(list, zip(*texts, strict=True)), strict=True)) if texts else {}
    path = write(tmp_path_factory.mktemp("p"), **({"s": [], "a": [], "b": []} | columns))
    files = ParallelFiles(path["s"], [path["a"], path["b"]], encoding="utf-8")
    rows = list(files.rows((), None))
    has_mark = bool(texts) and any(text.startswith("\ufeff") for text in texts[0])
    expected = [
        (k * len(texts) + i, (i, line[0], line[1 + k], "ab"[k]))
        for k in range(2)
        for i, line in enumerate(texts, 1)
        if line[0].strip() or line[1 + k].strip()
    ]
    if not has_mark:  # a mark at the start of a file is none of its text
        assert [(row.number, tuple(row.fields.values())) for row in rows] == expected
    assert len(rows) + files.blank == 2 * len(texts)
