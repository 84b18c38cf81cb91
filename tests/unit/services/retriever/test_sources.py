"""Check which files are documents and the names of their pages."""

from __future__ import annotations

import contextlib
import os
import unicodedata

import pytest

from scorekit.errors import UserError
from services.retriever.index.sources import counted, find_sources


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return folder


def page_names(*paths):
    return [(source.document, source.page) for source in find_sources(paths)[0]]


def test_the_stem_is_the_document_and_a_number_behind_it_the_page_of_a_picture(tmp_path):
    make(tmp_path, "deck.pdf", "scan_2.png", "scan_010.JPG", "sub/photo.webp", "a_0.png", "x.txt")
    assert page_names(tmp_path) == [
        ("a_0", 1),
        ("deck", None),
        ("photo", 1),
        ("scan", 2),
        ("scan", 10),
    ]


def test_a_tiff_has_pages_of_its_own_or_is_the_page_that_its_name_says(tmp_path):
    make(tmp_path, "fax.tif", "scan_2.TIFF", "chart.gif", "map.BMP")
    assert page_names(tmp_path) == [("chart", 1), ("fax", None), ("map", 1), ("scan", 2)]
    assert not any(source.is_pdf for source in find_sources([tmp_path]).documents)


def test_files_of_other_kinds_are_counted_by_their_ending(tmp_path):
    make(tmp_path, "a.pdf", "b.docx", "sub/C.DOCX", "d.txt", "README", ".DS_Store", ".x.swp")
    name = os.fsencode(tmp_path) + b"/bad.\xff"
    with open(name, "wb"):
        pass
    other_files = find_sources([tmp_path]).other_files
    assert other_files == {
        ".docx": 2,
        ".txt": 1,
        ".swp": 1,
        ".DS_Store": 1,
        ".?": 1,
        "without an ending": 1,
    }
    assert counted(other_files, 2) == "2 .docx, 1 .?, 4 others"


def test_folders_that_are_not_read_are_listed(tmp_path):
    make(tmp_path, "files/a.pdf", "elsewhere/b.pdf", "files/closed/c.pdf")
    (tmp_path / "files/linked").symlink_to(tmp_path / "elsewhere")
    closed = tmp_path / "files/closed"
    closed.chmod(0)
    try:
        with as_a_user_without_rights(tmp_path):
            sources, skipped, _ = find_sources([tmp_path / "files"])
    finally:
        closed.chmod(0o755)
    assert [source.document for source in sources] == ["a"]
    assert {skip.source: skip.reason for skip in skipped} == {
        "closed": "the folder cannot be read: Permission denied",
        "linked": "a link to a folder, which is not followed. Name that folder, too",
    }


@contextlib.contextmanager
def as_a_user_without_rights(folder):
    """Give up root's rights for a while: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o555)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_names_are_composed_as_data_files_have_them(tmp_path):
    make(tmp_path, unicodedata.normalize("NFD", "보고서") + ".pdf")
    assert page_names(tmp_path) == [("보고서", None)]


@pytest.mark.parametrize(
    "names",
    [
        ("a/deck.pdf", "b/deck.pdf"),
        ("deck.pdf", "deck.PDF"),
        ("deck.pdf", "deck_3.png"),
        ("scan_2.png", "scan_002.jpg"),
        ("photo.png", "photo_1.png"),
        ("fax.tif", "fax.pdf"),
        ("fax.tif", "fax_2.png"),
        (unicodedata.normalize("NFD", "가") + ".pdf", "가.pdf"),
    ],
)
def test_two_files_with_pages_of_one_id_are_refused(tmp_path, names):
    make(tmp_path, *names)
    with pytest.raises(UserError, match="rename one"):
        find_sources([tmp_path])


def test_the_same_file_named_twice_is_one(tmp_path):
    make(tmp_path, "deck.pdf")
    assert page_names(tmp_path, tmp_path / "deck.pdf") == [("deck", None)]


def test_names_that_can_be_no_id_are_skipped_with_a_reason(tmp_path):
    make(tmp_path, "good.pdf", "bad\nname.pdf", "x" * 201 + ".pdf", " .pdf")
    sources, skipped, _ = find_sources([tmp_path])
    assert [source.document for source in sources] == ["good"]
    assert len(skipped) == 3 and all("plain text" in skip.reason for skip in skipped)


def test_nothing_there_is_a_mistake_of_the_user(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        find_sources([tmp_path / "none"])
    with pytest.raises(UserError, match=r"no PDF, PNG, .* or TIFF there, but 1 \.txt$"):
        find_sources([make(tmp_path, "a.txt")])
    with pytest.raises(UserError, match="expected a file ending"):
        find_sources([tmp_path / "a.txt"])


def test_what_has_the_name_of_a_document_and_is_no_file_is_listed(tmp_path):
    make(tmp_path, "deck.pdf")
    (tmp_path / "gone.pdf").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    sources, skipped, _ = find_sources([tmp_path])
    assert [source.document for source in sources] == ["deck"]
    assert [skip.source for skip in skipped] == ["gone.pdf", "pipe.png"]
    with pytest.raises(UserError, match="no PDF"):
        find_sources([tmp_path / "pipe.png"])
