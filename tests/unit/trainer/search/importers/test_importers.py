"""Check that datasets in their published shapes become questions and page files, or are refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from scorekit.errors import UserError
from tests.kits.retrieval.pdf import draw_pdf
from tests.kits.trainer.searching.published_files import (
    CHINESE,
    KOREAN,
    corpus_row,
    hub_slide_row,
    image_of,
    long_row,
    qrel_row,
    query_row,
    seek_row,
    slide_row,
    write_lines,
    write_long,
    write_parquet,
    write_seek,
    write_slides,
    write_vidore,
)
from trainer.search.cli import Dataset
from trainer.search.config import SearchData
from trainer.search.data import load_questions
from trainer.search.importers.published import ImportOptions
from trainer.search.importers.run import IMPORTERS, Imported, run_import


def imported(dataset: str, root: Path, *, split: str | None = None, **more: Any) -> Imported:
    options = ImportOptions(root, more.pop("images", None), (split,) if split else ())
    return run_import(dataset, options, root.parent / "out", **more)


def refused(dataset: str, root: Path, **more: Any) -> str:
    """Return the whole message; nothing may be left of the import."""
    before = set(root.parent.iterdir())
    with pytest.raises(UserError) as raised:
        imported(dataset, root, **more)
    assert set(root.parent.iterdir()) == before
    return "\n".join([str(raised.value), *raised.value.lines])


def questions_of(result: Imported, split: str):
    return load_questions(str(result.out / f"{split}.jsonl"), SearchData())


def page_files(result: Imported) -> set[str]:
    pages = result.out / "pages"
    return {path.relative_to(pages).as_posix() for path in pages.rglob("*.*")}


def test_slidevqa_of_github_is_imported_by_split(tmp_path):
    root = tmp_path / "SlideVQA"
    write_slides(root, "train", [slide_row(1, "deck", [2]), slide_row(2, KOREAN, [1, 3])])
    write_slides(root, "dev", [slide_row(3, CHINESE, [3], reasoning_type="Multi-Hop")])
    result = imported("slidevqa", root)
    first, second = questions_of(result, "train")
    assert (first.id, first.reference_answers, first.gold) == ("1", ("answer 1",), ("deck_2",))
    assert (first.question, first.question_type) == ("What is question 1?", "Single-Hop")
    assert second.gold == (f"{KOREAN}_1", f"{KOREAN}_3")
    (third,) = questions_of(result, "dev")
    assert (third.gold, third.question_type) == ((f"{CHINESE}_3",), "Multi-Hop")
    assert len(page_files(result)) == 9
    assert (result.out / f"pages/{KOREAN}/{KOREAN}_1.png").read_bytes() == image_of(11)
    manifest = json.loads((result.out / "manifest.json").read_text("utf-8"))
    assert (manifest["pages"], manifest["documents"]) == (9, 3)
    assert manifest["splits"]["train"]["questions"] == 2
    assert "NTT" in manifest["licence"] and "0d4168a" in manifest["schema"]


def test_slidevqa_of_the_hub_has_its_images_in_the_rows(tmp_path):
    root = tmp_path / "hub"
    rows = [hub_slide_row(1, "deck", [2]), hub_slide_row(2, "deck", [3])]
    write_parquet(root / "data" / "train-00000-of-00002.parquet", rows)
    rows = [hub_slide_row(3, "another", [1])]
    write_parquet(root / "data" / "train-00001-of-00002.parquet", rows)
    result = imported("slidevqa", root)
    assert [question.gold for question in questions_of(result, "train")] == [
        ("deck_2",),
        ("deck_3",),
        ("another_1",),
    ]
    assert len(page_files(result)) == 6  # the deck of two questions once
    (tmp_path / "out").rename(tmp_path / "first")
    assert "--images: the images are in the rows" in refused("slidevqa", root, images=root)
    other = hub_slide_row(4, "deck", [1], page_2={"bytes": image_of(99), "path": "2.jpg"})
    write_parquet(root / "data" / "test-00000-of-00001.parquet", [rows[0], other])
    assert "page 2 of 'deck' is another image than in" in refused("slidevqa", root)


def test_every_dataset_of_the_command_has_an_importer():
    assert set(IMPORTERS) == {dataset.value for dataset in Dataset}


def test_only_the_named_split_is_imported(tmp_path):
    root = tmp_path / "SlideVQA"
    write_slides(root, "train", [slide_row(1, "a", [1])])
    write_slides(root, "dev", [slide_row(2, "b", [1])])
    assert "--split val" in refused("slidevqa", root, split="val")
    result = imported("slidevqa", root, split="dev")
    assert sorted(path.name for path in result.out.iterdir()) == [
        "dev.jsonl",
        "manifest.json",
        "pages",
    ]


def test_all_problems_of_slides_are_listed_with_file_and_row(tmp_path):
    root = tmp_path / "SlideVQA"
    rows = [
        slide_row(1, "deck", [1]),
        slide_row(1, "deck", [2]),
        slide_row(3, "deck", [4]),
        slide_row(4, "deck", [0]),
        slide_row(5, "deck", [1], answer=" "),
        slide_row(6, "../../x", [1]),
        slide_row(7, "empty", [2]),
        slide_row(8, "gone", [3]),
        slide_row(9, "deck", [1], question="a\0b"),
        slide_row(10, "text", [1]),
        slide_row(11, "deck", []),
        slide_row(12, "long" * 60, [1]),
    ]
    file = write_slides(root, "train", [row for row in rows if row["qa_id"] != 12])
    write_lines(file, rows)
    images = root / "images" / "train"
    (images / "empty" / "empty-2-1024.jpg").write_bytes(b"")
    (images / "gone" / "gone-3-1024.jpg").unlink()
    (images / "text" / "text-1-1024.jpg").write_text("<html>404</html>")
    message = refused("slidevqa", root)
    for problem in (
        "line 2: the id '1' is in",
        "line 3: page 4 is out of range: 'deck' has the pages 1 to 3",
        "line 4: evidence_pages: expected a whole number >= 1, not 0",
        "line 5: answer: empty",
        "line 6: deck_name: '../../x': expected a name without folders",
        "line 7: page 2 of 'empty': the image is an empty file",
        "line 8: page 3 of 'gone': the image is missing",
        "gone/gone-3-1024.jpg",
        "line 9: question: has a NUL character",
        "line 10: page 1 of 'text': not a PNG, JPEG or WebP image",
        "line 11: evidence_pages: empty",
        "too long for the name of a file",
        "Nothing was written",
    ):
        assert problem in message, problem
    result = imported("slidevqa", root, leave_out=True)
    assert [question.id for question in questions_of(result, "train")] == ["1"]
    assert result.manifest["splits"]["train"]["left_out"] == 11
    assert any("the id '1' is in" in line for line in result.manifest["left_out"])
    assert "deck/deck_1.png" in page_files(result) and len(page_files(result)) == 9


def test_an_address_of_an_image_leads_nowhere_else(tmp_path):
    root = tmp_path / "SlideVQA"
    secret = tmp_path / "secret.png"
    secret.write_bytes(image_of(1))
    urls = ["https://example.com/%2e%2e/%2e%2e/%2e%2e/%2e%2e/secret.png", "https://x/..", "/"]
    write_slides(root, "train", [slide_row(1, "deck", [1], image_urls=urls)])
    assert "page 1 of 'deck': the image is missing" in refused("slidevqa", root)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"evidence": [1]}, "line 1: unknown: 'evidence'. The published columns are deck_name"),
        ({"answer": ...}, "line 1: missing: 'answer'"),
    ],
)
def test_other_columns_than_the_published_ones_are_refused(tmp_path, change, problem):
    root = tmp_path / "SlideVQA"
    row = {k: v for k, v in (slide_row(1, "deck", [1]) | change).items() if v is not ...}
    write_slides(root, "train", [row])
    assert problem in refused("slidevqa", root, leave_out=True)
    hub = {k: v for k, v in (hub_slide_row(1, "deck", [1]) | change).items() if v is not ...}
    write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", [hub])
    assert problem.partition(": ")[2] in refused("slidevqa", tmp_path / "hub")


def test_a_file_in_another_encoding_is_refused_by_line(tmp_path):
    root = tmp_path / "SlideVQA"
    file = write_slides(root, "train", [slide_row(1, KOREAN, [1])])
    write_lines(file, [slide_row(1, KOREAN, [1])], "cp949")
    assert "train.jsonl, line 1: not UTF-8 text" in refused("slidevqa", root)


def test_a_missing_shard_and_an_existing_target_are_refused(tmp_path):
    root = tmp_path / "hub"
    write_parquet(root / "data" / "train-00001-of-00002.parquet", [hub_slide_row(1, "deck", [1])])
    assert "1 of 2 shards exist" in refused("slidevqa", root)
    (tmp_path / "out").mkdir()
    assert "already exists" in refused("slidevqa", root)


def test_leftovers_of_a_killed_import_are_removed(tmp_path):
    root = tmp_path / "SlideVQA"
    write_slides(root, "train", [slide_row(1, "deck", [1])])
    leftover = tmp_path / ".out.0123456789ab.tmp"
    (leftover / "pages").mkdir(parents=True)
    imported("slidevqa", root)
    assert not leftover.exists()


def test_vidoseek_is_imported_from_json_and_a_zip_of_pdfs(tmp_path):
    root = tmp_path / "ViDoSeek"
    decomposed = normalize("NFD", f"{KOREAN}.pdf")
    rows = [seek_row("a_2", "plan.pdf", [2, 1]), seek_row("b", f"{KOREAN}.pdf", 1)]
    write_seek(root, rows, {"plan.pdf": 2, decomposed: 1, "unused.pdf": 1})
    result = imported("vidoseek", root)
    first, second = questions_of(result, "test")
    assert (first.id, first.gold) == ("a_2", ("plan_2", "plan_1"))
    assert (first.file_name, first.question_type) == ("plan.pdf", "Multi-Hop")
    assert second.gold == (f"{KOREAN}_1",)
    assert page_files(result) == {"plan.pdf", f"{KOREAN}.pdf", "unused.pdf"}
    assert result.manifest["pages"] == 4
    # the same form in another file, with a folder of PDFs
    rows = [seek_row("c", "plan.pdf", [1])]
    file = write_lines(tmp_path / "slidevqa_refined.jsonl", rows)
    options = ImportOptions(file, result.out / "pages")
    second_import = run_import("vidoseek", options, tmp_path / "again")
    assert [question.gold for question in questions_of(second_import, "test")] == [("plan_1",)]


def test_problems_of_pdfs_are_listed(tmp_path):
    root = tmp_path / "ViDoSeek"
    rows = [
        seek_row("a", "plan.pdf", [3]),
        seek_row("b", "gone.pdf", [1]),
        seek_row("c", "broken.pdf", [1]),
        seek_row("d", "plan.pdf", [1], reference_answer=["x", "y"]),
        seek_row("e", "plan.pdf", [2]),
    ]
    write_seek(root, rows, {"plan.pdf": 2})
    pdfs = tmp_path / "pdfs"
    (pdfs / "deeper").mkdir(parents=True)
    (pdfs / "broken.pdf").write_bytes(b"")
    imported("vidoseek", root, leave_out=True)
    for name in ("plan.pdf", "deeper/plan.PDF"):
        (pdfs / name).write_bytes((tmp_path / "out" / "pages" / "plan.pdf").read_bytes())
    (pdfs / "._plan.pdf").write_bytes(b"what macOS puts beside a file")
    (tmp_path / "out").rename(tmp_path / "first")
    message = refused("vidoseek", root, images=pdfs)
    for problem in (
        "entry 1: page 3 is out of range: 'plan' has the pages 1 to 2",
        "entry 2: there is no page file of 'gone'",
        "entry 3: there is no page file of 'broken'",
        "broken.pdf: not a PDF that can be read",
        "another file has the name 'plan', too",
        "entry 4: reference_answer: a list of 2",
    ):
        assert problem in message, problem
    result = imported("vidoseek", root, images=pdfs, leave_out=True)
    assert [question.id for question in questions_of(result, "test")] == ["e"]


def test_vidoseek_with_other_keys_is_refused(tmp_path):
    root = tmp_path / "ViDoSeek"
    row = seek_row("a", "plan.pdf", [1])
    row["meta_info"] |= {"bbox": [1]}
    write_seek(root, [row], {"plan.pdf": 1})
    assert "entry 1: meta_info: unknown: 'bbox'" in refused("vidoseek", root)
    write_seek(root, [seek_row("a", "plan.pdf", [1], split="train")], {"plan.pdf": 1})
    assert "entry 1: unknown: 'split'" in refused("vidoseek", root)
    (root / "vidoseek.json").write_text('{"rows": []}')
    assert "unknown: 'rows'. The published columns are examples" in refused("vidoseek", root)
    (root / "vidoseek.json").write_bytes(b"\xff\xfe{\0}\0")
    assert "not UTF-8 text" in refused("vidoseek", root)


LONG = [
    long_row("report.pdf", "Less well-off", "Str", "[2]"),
    long_row("report.pdf", "8", "Int", "[1, 2]"),
    long_row("report.pdf", "18.29%", "Float", "[]"),
    long_row("report.pdf", "['White', '10%']", "List", "[1]"),
    long_row("report.pdf", "Not answerable", "None", "[]"),
]


def test_mmlongbench_has_texts_numbers_lists_and_no_answers(tmp_path):
    root = tmp_path / "MMLongBench-Doc"
    write_long(root, LONG, {"report.pdf": 2})
    result = imported("mmlongbench", root)
    questions = questions_of(result, "test")
    assert [question.reference_answer for question in questions] == [
        "Less well-off",
        "8",
        "18.29%",
        '["White", "10%"]',
    ]
    assert [question.gold for question in questions] == [
        ("report_2",),
        ("report_1", "report_2"),
        (),
        ("report_1",),
    ]
    assert [question.id for question in questions][:2] == ["mmlongbench-0001", "mmlongbench-0002"]
    counts = result.manifest["splits"]["test"]
    assert (counts["unanswerable_left_out"], counts["without_gold_page"]) == (1, 1)
    assert "test: questions 4, unanswerable left out 1, without gold page 1" in result.lines()


def test_unanswerable_questions_are_there_where_they_are_wanted(tmp_path):
    root = tmp_path / "hub"
    write_long(root, [], {"report.pdf": 2})
    assert "only mmlongbench" in refused("slidevqa", root, keep_unanswerable=True)
    (root / "data" / "samples.json").unlink()
    write_parquet(root / "data" / "train-00000-of-00001.parquet", LONG)
    result = imported("mmlongbench", root, keep_unanswerable=True)
    last = questions_of(result, "test")[-1]
    assert (last.reference_answer, last.gold) == ("Not answerable", ())
    assert last.question_type == "unanswerable"
    assert result.manifest["splits"]["test"]["unanswerable"] == 1


def test_an_answer_or_page_of_mmlongbench_that_cannot_be_read_is_listed(tmp_path):
    root = tmp_path / "MMLongBench-Doc"
    rows = [
        long_row("report.pdf", "['White', 10%]", "List", "[1]"),
        long_row("report.pdf", "x", "Dict", "[1]"),
        long_row("report.pdf", "x", "Str", "[3]"),
        long_row("a/report.pdf", "x", "Str", "[1]"),
        long_row("report.pdf", "", "Str", "[1]"),
    ]
    write_long(root, rows, {"report.pdf": 2})
    message = refused("mmlongbench", root)
    for problem in (
        "entry 1: answer: not a list: \"['White', 10%]\"",
        "entry 2: answer_format: 'Dict'",
        "entry 3: page 3 is out of range",
        "entry 4: doc_id: 'a/report.pdf': expected a name without folders",
        "entry 5: answer: empty",
    ):
        assert problem in message, problem


CORPUS = [corpus_row(4, "report", 0), corpus_row(5, "report", 1), corpus_row(6, "plan", 0)]


def test_vidore_counts_pages_from_zero_and_has_gold_in_several_documents(tmp_path):
    root = tmp_path / "vidore_v3_hr"
    queries = [query_row(1), query_row(2, raw_answers=None), query_row(3, language="french")]
    qrels = [qrel_row(1, 5, 1), qrel_row(1, 6), qrel_row(2, 4), qrel_row(2, 5, 0), qrel_row(3, 4)]
    write_vidore(root, CORPUS, queries, qrels)
    result = imported("vidore_v3", root)
    first, second, third = questions_of(result, "test")
    assert (first.gold, first.file_name) == (("report_2", "plan_1"), "")
    assert first.reference_answers == ("12 %", "about 12 percent")
    assert (first.question_type, third.id) == ("multi-hop+numerical", "3")
    assert (second.gold, second.file_name) == (("report_1",), "report.pdf")
    assert page_files(result) == {
        "report/report_1.png",
        "report/report_2.png",
        "plan/plan_1.png",
    }
    options = ImportOptions(root, language="french")
    french = run_import("vidore_v3", options, tmp_path / "french")
    assert [question.id for question in questions_of(french, "test")] == ["3"]


def test_problems_of_vidore_are_listed(tmp_path):
    root = tmp_path / "vidore_v3_hr"
    corpus = [*CORPUS, corpus_row(4, "other", 0), corpus_row(7, "../x", 0)]
    queries = [query_row(1), query_row(1), query_row(2, answer="", raw_answers=[]), query_row(3)]
    write_vidore(root, corpus, queries, [qrel_row(1, 4), qrel_row(3, 9), qrel_row(3, 5)])
    message = refused("vidore_v3", root)
    for problem in (
        "corpus_id: 4 exists twice",
        "doc_id: '../x': expected a name without folders",
        "row 2: the id '1' is in",
        "row 3: answer: empty",
        "corpus_id: the corpus has no page 9",
        "row 4: query_id: a gold page of it is not in the corpus",
    ):
        assert problem in message, problem
    result = imported("vidore_v3", root, leave_out=True)
    assert [question.id for question in questions_of(result, "test")] == ["1"]
    write_vidore(root, [row | {"dpi": 3} for row in CORPUS], queries, [qrel_row(1, 4)])
    (tmp_path / "out").rename(tmp_path / "first")
    assert "unknown: 'dpi'" in refused("vidore_v3", root)


def test_a_pdf_whose_bytes_in_the_zip_are_damaged_is_listed(tmp_path):
    root = tmp_path / "ViDoSeek"
    write_seek(root, [seek_row("a", "plan.pdf", [1])], {"plan.pdf": 1})
    (root / "vidoseek_pdf_document.zip").unlink()
    archive = root / "vidoseek_pdf_document.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("vidoseek_pdf_document/plan.pdf", b"%PDF-1.4 " * 1000)
    content = bytearray(archive.read_bytes())
    start = 30 + len("vidoseek_pdf_document/plan.pdf")
    content[start : start + 20] = b"\xff" * 20
    archive.write_bytes(content)
    assert "plan.pdf: cannot be read: Error -3" in refused("vidoseek", root)


def test_a_zip_that_unpacks_to_far_more_than_it_has_is_refused(tmp_path):
    root = tmp_path / "ViDoSeek"
    write_seek(root, [seek_row("a", "plan.pdf", [1])], {"plan.pdf": 1})
    archive = root / "vidoseek_pdf_document.zip"
    with (
        zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file,
        file.open("vidoseek_pdf_document/bomb.pdf", "w") as part,
    ):
        for _ in range(65):
            part.write(bytes(2**20))
    assert archive.stat().st_size < 2**18
    message = refused("vidoseek", root)
    assert "bomb.pdf' would have 68,157,440 bytes, more than 50 times" in message


def test_a_zip_of_many_small_bombs_is_refused(tmp_path):
    root = tmp_path / "ViDoSeek"
    write_seek(root, [seek_row("a", "plan.pdf", [1])], {"plan.pdf": 1})
    archive = root / "vidoseek_pdf_document.zip"
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        for number in range(5):
            file.writestr(f"vidoseek_pdf_document/{number}.pdf", bytes(2**24))
    assert "its PDFs would have" in refused("vidoseek", root)


def test_a_zip_cannot_write_outside_the_folder(tmp_path):
    root = tmp_path / "deep" / "ViDoSeek"
    write_seek(root, [seek_row("a", "plan.pdf", [1])], {"plan.pdf": 1})
    pdf = draw_pdf(tmp_path / "drawn", [["a page"]])
    with zipfile.ZipFile(root / "vidoseek_pdf_document.zip", "a") as file:
        file.write(pdf, "../../../escaped.pdf")
    pdf.unlink()
    result = imported("vidoseek", root)
    assert page_files(result) == {"plan.pdf", "escaped.pdf"}
    assert all(result.out in path.parents for path in tmp_path.glob("**/escaped.pdf"))
