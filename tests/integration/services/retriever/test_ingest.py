"""Test the build of an index: unreadable files, the revision, and killed runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import uuid
import zlib
from pathlib import Path

import httpx
import PIL
import pypdfium2
import pytest
from PIL import Image
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.files import temporary_of
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.command import app
from services.retriever.index import reader
from services.retriever.index.images import sha256
from services.retriever.index.ingest import ingest
from services.retriever.index.reader import ReadingRules
from services.retriever.index.store import Index
from services.retriever.model import RetrieverBackend
from testing.servers import PATIENCE_S, alive, running_service, wait_until
from tests.kits import forked
from tests.kits.retrieval.form_pdf import annotated_pdf, appearance, field, text_at
from tests.kits.retrieval.hooks import MOST
from tests.kits.retrieval.pdf import draw_pdf

ROOT = Path(__file__).parents[4]
HOOK = "tests.kits.retrieval.hooks:read"


def make(sources, index, rules=None, **more):
    sources = sources if isinstance(sources, list) else [sources]
    return ingest(sources, index, [Bm25Builder("bigrams")], rules, workers=1, **more)


def scan(path, colour):
    Image.new("RGB", (64, 48), colour).save(path)
    return path


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def reasons(manifest):
    return {(skipped.source, skipped.page): skipped.reason for skipped in manifest.skipped}


def words(index, query):
    with running_service(RetrieverBackend(index)) as url:
        answer = httpx.post(f"{url}/v1/search", json={"queries": [{"query": query}]})
    return [hit["page_id"] for hit in answer.json()["results"][0]["hits"]]


def test_damaged_files_are_listed_with_a_reason_and_the_rest_is_read(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    good = draw_pdf(sources / "good.pdf", [["steel"], ["rice"]])
    content = good.read_bytes()
    (sources / "empty.pdf").write_bytes(b"")
    (sources / "text.pdf").write_bytes(b"no PDF at all")
    (sources / "cut.pdf").write_bytes(content[: len(content) // 3])
    (sources / "cut_off.png").write_bytes(scan(tmp_path / "s.png", "red").read_bytes()[:90])
    (sources / "words.jpg").write_bytes(b"no picture")
    locked = Canvas(str(sources / "locked.pdf"), encrypt=StandardEncryption("secret"))
    locked.drawString(50, 50, "hidden")
    locked.save()
    manifest = make(sources, tmp_path / "index")
    reason_by_page = reasons(manifest)
    assert manifest.pages == 2 and set(reason_by_page) >= {
        ("empty.pdf", None),
        ("text.pdf", None),
        ("cut_off.png", None),
        ("words.jpg", None),
        ("locked.pdf", None),
    }
    assert "password" in reason_by_page["locked.pdf", None]
    assert "PNG" in reason_by_page["words.jpg", None]
    assert not any(str(tmp_path) in reason for reason in reason_by_page.values())


def test_a_filled_form_is_found_by_what_is_written_in_it(tmp_path):
    tick = "/V /Yes /AS /Yes /AP << /N << /Yes @0 >> >>"
    content = annotated_pdf(
        field("Tx", (100, 250, 250, 270), "(Mueller)"),
        field("Tx", (100, 200, 250, 220), "(secretword)", visibility=2),
        (field("Btn", (20, 80, 35, 95), more=tick), appearance("4", "/ZaDb")),
        text=text_at(20, 255, "Name"),
    )
    (tmp_path / "form.pdf").write_bytes(content)
    make(tmp_path / "form.pdf", tmp_path / "index")
    (page,) = Index(tmp_path / "index").open()[1]
    assert page.text == "Name\nMueller\n\u2611"
    assert words(tmp_path / "index", "Mueller") == ["form_1"]
    assert words(tmp_path / "index", "secretword") == []


def test_a_scanned_form_is_read_by_ocr_and_by_its_fields(tmp_path):
    """Check that a page that has ticks alone counts as one without text."""
    scanned = "1 0 0 rg 0 0 400 300 re f"
    stamp = "/Type /Annot /Subtype /Stamp /F 4 /Rect [100 50 250 70] /AP << /N @0 >>"
    (tmp_path / "scan.pdf").write_bytes(annotated_pdf((stamp, appearance("PAID")), text=scanned))
    tick = field("Btn", (20, 80, 35, 95), more="/V /Yes /AS /Yes /MK << /BC [0 0 0] >>")
    (tmp_path / "ticks.pdf").write_bytes(annotated_pdf(tick, text=scanned))
    make([tmp_path / "scan.pdf"], tmp_path / "index", ReadingRules(ocr=HOOK))
    (page,) = Index(tmp_path / "index").open()[1]
    assert sorted(page.text.split("\n")) == ["PAID", "read by ocr"]
    stamp = "/Type /Annot /Subtype /Stamp /F 4 /Rect [0 286 40 306] /AP << /N @0 >>"
    over = annotated_pdf((stamp, appearance("PAID", width=40)), text=scanned)
    (tmp_path / "over.pdf").write_bytes(over)
    make([tmp_path / "over.pdf"], tmp_path / "index", ReadingRules(ocr=HOOK))
    assert Index(tmp_path / "index").open()[1][0].text == "PAID"  # OCR reads it once more
    assert make([tmp_path / "scan.pdf", tmp_path / "ticks.pdf"], tmp_path / "index").textless == [
        "ticks_1"
    ]


def test_pages_of_an_older_index_are_read_anew_only_where_annotations_may_be(tmp_path):
    stamp = "/Type /Annot /Subtype /FreeText /F 4 /Rect [100 250 250 270] /Contents (typed)"
    (tmp_path / "noted.pdf").write_bytes(annotated_pdf(stamp, text=text_at(20, 200, "text")))
    draw_pdf(tmp_path / "plain.pdf", [["steel"]])
    sources, index = [tmp_path / "noted.pdf", tmp_path / "plain.pdf"], tmp_path / "index"
    manifest = make(sources, index)
    for source in sources:  # as the version before annotations stored its pages
        content = source.read_bytes()
        facts = (*ReadingRules(), pypdfium2.PDFIUM_INFO.version, PIL.__version__, sha256(content))
        key = sha256("\0".join(map(str, facts)).encode())[:32]
        record = index / "done" / key[:2] / key / "1.json"
        if source.stem == "plain":
            assert record.exists()  # its pages need not be read again
            continue
        assert not record.exists()
        record.parent.mkdir(parents=True)
        page = Index(index).open()[1][0]
        fields = {"page_id", "document", "page"}
        record.write_text(page.model_copy(update={"boxes": []}).model_dump_json(exclude=fields))
    assert make(sources, index) == manifest
    assert Index(index).open()[1][0].text == "typed\ntext"


def test_each_page_of_a_tiff_is_a_page(tmp_path):
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "black")]
    frames[0].save(tmp_path / "fax.tif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "scan_7.tiff")
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    shutil.copy(tmp_path / "fax.tif", tmp_path / "fax_3.tif")
    sources = [tmp_path / name for name in ("fax.tif", "scan_7.tiff", "moving.gif")]
    rules = ReadingRules(ocr="tests.kits.retrieval.hooks:read_shade")
    manifest = make(sources, tmp_path / "index", rules)
    pages = Index(tmp_path / "index").open()[1]
    assert [page.page_id for page in pages] == ["fax_1", "fax_2", "moving_1", "scan_7"]
    assert pages[0].picture == pages[2].picture != pages[1].picture
    note = "its frames 2 to 2: of an animation the first is a page"
    assert reasons(manifest) == {("moving.gif", None): note}
    manifest = make([sources[1], tmp_path / "fax_3.tif"], tmp_path / "index", rules)
    assert "a TIFF of 2 pages. Rename it" in reasons(manifest)["fax_3.tif", None]


def test_files_of_other_kinds_are_counted_in_a_line(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    draw_pdf(sources / "deck.pdf", [["steel"]])
    for name in ("a.docx", "b.DOCX", "notes.txt"):
        (sources / name).write_text("words")
    (sources / "empty.png").touch()
    flags = ["--index", str(tmp_path / "index"), "--korean", "bigrams"]
    result = CliRunner().invoke(app, [str(sources), *flags])
    assert result.exit_code == 0
    assert "left out 3 files of other kinds: 2 .docx, 1 .txt\n" in result.stderr
    assert "skipped empty.png: an empty file\n" in result.stderr
    manifest = Index(tmp_path / "index").manifest()
    assert manifest is not None and manifest.other_files == {".docx": 2, ".txt": 1}


def test_a_small_file_that_says_it_is_a_huge_picture_is_not_decoded(tmp_path):
    small = bytearray(scan(tmp_path / "s.png", "red").read_bytes())
    small[16:24] = struct.pack(">II", 60_000, 60_000)  # of its header
    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    (tmp_path / "bomb.png").write_bytes(small)
    scan(tmp_path / "good.png", "red")
    manifest = make(
        [tmp_path / "bomb.png", tmp_path / "good.png"],
        tmp_path / "index",
        ReadingRules(ocr=HOOK),
    )
    assert manifest.pages == 1 and "too many pixels" in reasons(manifest)["bomb.png", None]


def test_a_page_as_large_as_a_house_is_drawn_smaller(tmp_path):
    canvas = Canvas(str(tmp_path / "large.pdf"), pagesize=(14_000, 7_000))
    canvas.setFont("Helvetica", 700)
    canvas.drawString(1000, 3500, "wall")
    canvas.save()
    make(tmp_path / "large.pdf", tmp_path / "index", ReadingRules(max_pixels=80_000))
    (page,) = Index(tmp_path / "index").open()[1]
    assert 70_000 < page.width * page.height <= 80_000
    (box,) = page.boxes
    assert box.text == "wall" and 18 < box.letter_height < 22
    assert 27 < box.x1 < 33 and box.y2 == pytest.approx(100, abs=2)


def test_pages_without_text_are_listed_and_a_hook_reads_them(tmp_path):
    scan(tmp_path / "a_1.png", "red")
    draw_pdf(tmp_path / "b.pdf", [["text"], []])
    sources = [tmp_path / "a_1.png", tmp_path / "b.pdf"]
    assert make(sources, tmp_path / "index").textless == ["a_1", "b_2"]
    manifest = make(sources, tmp_path / "index", ReadingRules(ocr=HOOK))
    assert manifest.textless == []  # b_2 is not listed: the hook fails on it, and that is reported
    assert "--ocr failed (ValueError)" in reasons(manifest)["b.pdf", 2]
    assert words(tmp_path / "index", "ocr") == ["a_1"]


def test_a_page_that_kills_its_reader_costs_that_page_alone(tmp_path):
    for name, colour in (("deadly", "green"), ("good", "red")):
        scan(tmp_path / f"{name}.png", colour)
    manifest = make(
        [tmp_path / "deadly.png", tmp_path / "good.png"],
        tmp_path / "index",
        ReadingRules(ocr=HOOK),
    )
    assert reasons(manifest) == {("deadly.png", 1): "its reader ended (SIGKILL)"}
    assert manifest.pages == 1 and manifest.textless == []


def test_a_page_that_hangs_is_left(tmp_path):
    scan(tmp_path / "endless.png", "blue")
    with pytest.raises(UserError, match=r"none of 1 files .* longer than 1 s"):
        make(tmp_path / "endless.png", tmp_path / "index", ReadingRules(ocr=HOOK), timeout_s=1.0)
    assert Index(tmp_path / "index").manifest() is None


def test_a_hook_that_is_not_there_is_said_at_once(tmp_path):
    for name in (
        "no.such:function",
        "tests.kits.retrieval.hooks:none",
        "tests.kits.retrieval.hooks",
    ):
        with pytest.raises(UserError, match="--ocr"):
            make(scan(tmp_path / "a.png", "red"), tmp_path / "index", ReadingRules(ocr=name))


def test_the_revision_is_of_all_that_an_answer_depends_on(built_index, tmp_path):
    manifest = make(built_index.sources, tmp_path / "again")
    assert manifest.revision == built_index.manifest.revision  # for any folder and time
    assert (
        make(built_index.sources, tmp_path / "x", ReadingRules(dpi=72)).revision
        != manifest.revision
    )
    other = ingest(
        [built_index.sources], tmp_path / "x", [Bm25Builder("bigrams", k1=1.2)], workers=1
    )
    assert other.revision != manifest.revision
    sources = tmp_path / "renamed"
    shutil.copytree(built_index.sources, sources)
    (sources / "trade.pdf").rename(sources / "commerce.pdf")
    assert make(sources, tmp_path / "x").revision != manifest.revision


def test_the_index_is_of_the_files_that_were_named_last(tmp_path):
    first_pdf = draw_pdf(tmp_path / "one.pdf", [["steel"]])
    second_pdf = draw_pdf(tmp_path / "two.pdf", [["rice"]])
    first = make([first_pdf, second_pdf], tmp_path / "index")
    assert make([second_pdf], tmp_path / "index").pages == 1
    assert words(tmp_path / "index", "steel rice") == ["two_1"]
    assert make([first_pdf, second_pdf], tmp_path / "index") == first


def test_a_service_goes_on_with_the_index_that_it_has_begun_with(tmp_path):
    deck = draw_pdf(tmp_path / "deck.pdf", [["steel"], ["rice"]])
    make(deck, tmp_path / "index")
    with running_service(RetrieverBackend(tmp_path / "index")) as url:
        before = httpx.get(f"{url}/v1/info").json()
        image = httpx.get(f"{url}/v1/pages/deck_1/image").content
        draw_pdf(deck, [["copper"], ["wheat"], ["iron"]])
        make(deck, tmp_path / "index")
        make(deck, tmp_path / "index", ReadingRules(dpi=100))  # removes old files
        body = {"queries": [{"query": "steel"}, {"query": "copper"}], "cache": False}
        answer = httpx.post(f"{url}/v1/search", json=body).json()
        assert answer["index"]["revision"] == before["revision"]
        assert [len(result["hits"]) for result in answer["results"]] == [1, 0]
        assert httpx.get(f"{url}/v1/pages/deck_1/image").content == image
        assert httpx.get(f"{url}/v1/pages/deck_3").status_code == 404
        assert httpx.get(f"{url}/v1/info").json() == before
    with running_service(RetrieverBackend(tmp_path / "index")) as url:
        assert httpx.get(f"{url}/v1/info").json()["revision"] != before["revision"]


def test_a_picture_that_was_changed_behind_the_service_is_never_given(tmp_path):
    make(draw_pdf(tmp_path / "deck.pdf", [["steel"]]), tmp_path / "index")
    with running_service(RetrieverBackend(tmp_path / "index")) as url:
        (image_path,) = (tmp_path / "index/pictures").rglob("*.png")
        for change in (lambda: scan(image_path, "red"), image_path.unlink):
            change()
            for query in ("", "?crop=0,0,5,5"):
                answer = httpx.get(f"{url}/v1/pages/deck_1/image{query}")
                assert answer.status_code == 503
                assert answer.json()["error"]["type"] == "unavailable"
                assert str(tmp_path) not in answer.text


@pytest.mark.parametrize("damage", [lambda p: scan(p, "red"), Path.unlink, _cut])
def test_a_picture_that_is_damaged_is_made_again_by_the_same_command(tmp_path, damage):
    deck = draw_pdf(tmp_path / "deck.pdf", [["steel"]])
    manifest = make(deck, tmp_path / "index")
    (image_path,) = (tmp_path / "index/pictures").rglob("*.png")
    before = image_path.read_bytes()
    damage(image_path)
    assert make(deck, tmp_path / "index") == manifest
    assert image_path.read_bytes() == before


@pytest.mark.parametrize("file", ["pages.jsonl", "bm25/vocab.index.json"])
def test_a_damaged_index_is_refused(tmp_path, file):
    manifest = make(draw_pdf(tmp_path / "deck.pdf", [["steel"]]), tmp_path / "index")
    path = tmp_path / "index/states" / manifest.revision / file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="the files are damaged"):
        RetrieverBackend(tmp_path / "index").load()
    rebuilt = make(tmp_path / "deck.pdf", tmp_path / "index")
    assert rebuilt.revision == manifest.revision
    RetrieverBackend(tmp_path / "index").load()


def start(*args, **environment):
    return forked.Popen(
        [sys.executable, "-m", "services.retriever", *map(str, args)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_held(deck, index, max_pages):
    """Start a run that stops before page `max_pages` + 1 of those that it reads."""
    allowed = index.parent / f"most-{uuid.uuid4().hex}"  # an orphan may still read the last one
    allowed.write_text(f"{max_pages}")
    args = ["--korean", "bigrams", "--ocr", "tests.kits.retrieval.hooks:read_blocking"]
    return start("ingest", deck, "--index", index, *args, **{MOST: str(allowed)})


def records(index):
    return set((index / "done").rglob("[0-9]*.json"))


@pytest.mark.parametrize("index", ["index", "."])
def test_an_index_among_its_documents_is_no_document(tmp_path, index):
    draw_pdf(tmp_path / "a.pdf", ["one page"])
    first, second = (make(tmp_path, tmp_path / index) for _ in range(2))
    assert (second.pages, second.revision) == (1, first.revision)


def test_files_are_read_in_a_folder_that_has_services_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "subprocess", subprocess)  # the fork server has its own folder
    (tmp_path / "services.py").write_text("raise SystemExit(9)")
    draw_pdf(tmp_path / "a.pdf", ["one page"])
    monkeypatch.chdir(tmp_path)
    assert make(tmp_path / "a.pdf", tmp_path / "index").skipped == []


def test_a_run_that_is_killed_goes_on_with_the_next_page(tmp_path):
    deck = draw_pdf(tmp_path / "deck.pdf", [[]] * 12)
    index = tmp_path / "index"
    for max_pages, done in ((3, 3), (4, 7)):
        process = start_held(deck, index, max_pages)
        wait_until(lambda done=done: len(records(index)) == done)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        assert Index(index).manifest() is None  # no incomplete index
    # Files as a kill leaves them, and a record that a power cut has emptied.
    first = min(records(index))
    left = [first, index / "index.json", *(index / "pictures").rglob("*.png")]
    for path in left:
        temporary_of(path).write_bytes(b'{"wid')
    first.write_bytes(b"")
    process = start_held(deck, index, 12 - 7 + 1)  # otherwise more pages would be read again
    resumed_out, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert len(left) > 2 and not list(index.rglob("*.tmp"))
    uninterrupted = start_held(deck, tmp_path / "whole", 12)
    uninterrupted_out, stderr = uninterrupted.communicate(timeout=PATIENCE_S)
    assert resumed_out == uninterrupted_out and resumed_out.startswith(
        "12 pages of 1 documents, bm25; state "
    ), stderr


def test_ctrl_c_is_one_line_and_leaves_no_process(tmp_path):
    deck = draw_pdf(tmp_path / "deck.pdf", [[], []])
    process = start_held(deck, tmp_path / "index", 1)
    wait_until(lambda: records(tmp_path / "index"))
    (reader,) = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert stderr.strip().splitlines()[-1] == "stopped: run the same command to continue"
    wait_until(lambda: not alive(reader))


def children_of(pid):
    """Return the processes whose parent this is, on Linux."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                children.append(int(stat.parent.name))
    return children


def test_two_at_once_are_refused(tmp_path):
    deck = draw_pdf(tmp_path / "deck.pdf", [["steel"]])
    with Index(tmp_path / "index").writing(), pytest.raises(UserError, match="another ingest"):
        make(deck, tmp_path / "index")
    assert make(deck, tmp_path / "index").pages == 1


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    deck = draw_pdf(tmp_path / "deck.pdf", [["steel"]])
    index = tmp_path / "index"
    for args, line in [
        ([deck, "--backend", "dense"], "--embeddings-url"),
        ([deck, "--backend", "late"], "--late-model"),
        ([deck, "--backend", "late", "--late-model", "m"], "--late-url and --late-vectors"),
        ([deck, "--approximate"], "only for --backend late"),
        ([deck, "--ocr", "none"], "--ocr none"),
        ([tmp_path / "none.pdf"], "no such file or folder"),
    ]:
        result = CliRunner().invoke(app, [*map(str, args), "--index", str(index)])
        assert result.exit_code == 2 and result.stderr.startswith("error: "), result.stderr
        assert result.stderr.count("\n") == 1 and line in result.stderr
    assert not index.exists()
    (tmp_path / "bad.pdf").write_bytes(b"bad")
    for args, line in [
        (["ingest", tmp_path / "bad.pdf", "--index", index], "bad.pdf: not a PDF, or damaged"),
        (["--index", tmp_path / "none"], "no index there. Make one"),
        (["--index", index, "--late-url", "http://a:b@c"], "RETRIEVER_LATE_URL"),
    ]:
        process = start(*args)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        last = stderr.strip().splitlines()[-1]
        assert process.returncode == 2 and last.startswith("error: ") and line in last, stderr


def test_names_of_files_are_shown_and_never_obeyed(tmp_path):
    for name in ("\x1b]0;owned\x07\x1b[2J.pdf", "two\nskipped lines.pdf"):
        (tmp_path / name).touch()
    deck = draw_pdf(tmp_path / "deck.pdf", [["steel"]])
    flags = ["--index", str(tmp_path / "index"), "--korean", "bigrams"]
    result = CliRunner().invoke(app, [str(deck), str(tmp_path), *flags], color=True)
    assert result.exit_code == 0
    named = [line for line in result.stderr.splitlines() if line.startswith("skipped")]
    assert len(named) == 2 and "\x1b" not in result.stderr and "\x07" not in result.stderr


def test_a_full_disk_ends_the_run_and_leaves_the_index_as_it_was(tmp_path):
    """Check that documents are not blamed: nobody would notice that they are missing in the
    index."""
    sources, index = tmp_path / "sources", tmp_path / "index"
    sources.mkdir()
    draw_pdf(sources / "deck.pdf", [["steel"]])
    make(sources, index)
    before = (index / "index.json").read_bytes()
    noise = Image.effect_noise((300, 300), 90)
    noise.save(sources / "large.png")
    size = 2**15
    assert size < (sources / "large.png").stat().st_size
    flags = [str(sources), "--index", str(index), "--korean", "bigrams"]
    limited = ["tests.kits.disk.full", str(size), "services.retriever", "ingest", *flags]
    command = [sys.executable, "-m", *limited]
    full = forked.run(command, cwd=ROOT, capture_output=True, text=True)
    last = full.stderr.strip().splitlines()[-1]
    assert full.returncode == 2 and last.startswith("error: ") and "File too large" in last
    assert (index / "index.json").read_bytes() == before
    assert make(sources, index).pages == 2
