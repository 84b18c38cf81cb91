"""Check that every demo question can be answered from its pages and from no other page."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from demo.search.answer_keys import FINAL_KEYS, KEYS, Key, Spot, read_keys
from demo.search.final_test.questions import everything as final_questions
from demo.search.make_corpus import (
    FINAL_TEST,
    HELDOUT,
    PHASE2,
    SMALL_PRINT,
    TRAIN,
    phase2_lines,
)
from demo.search.reading import (
    CORPUS,
    FINAL_CORPUS,
    HEIGHT,
    LEGIBLE,
    WIDTH,
    Reader,
    Sight,
    is_legible,
)
from evidence.search.new_documents.questions import KEYS as NEW_KEYS
from evidence.search.new_documents.questions import QUESTIONS as NEW_QUESTIONS

FULL_PAGE = (0.0, 0.0, WIDTH, HEIGHT)


@pytest.fixture(scope="module")
def reader() -> Reader:
    """Return a reader of all pages, including those of the final test."""
    return Reader(CORPUS, FINAL_CORPUS)


def rows_of(*files: Path) -> dict[str, dict]:
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    return {row["question"]: row for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return rows_of(TRAIN, HELDOUT)


def test_most_questions_of_phase_2_need_small_print_and_all_are_training_questions() -> None:
    lines = TRAIN.read_text("utf-8").splitlines(keepends=True)
    chosen = PHASE2.read_text("utf-8").splitlines(keepends=True)
    assert chosen == phase2_lines(lines)
    types = Counter(json.loads(line)["question_type"] for line in chosen)
    assert types[SMALL_PRINT] > sum(types.values()) / 2
    assert types[SMALL_PRINT] < sum(types.values())


@pytest.fixture(scope="module")
def keys() -> list[Key]:
    return read_keys()


def gold(row: dict) -> set[str]:
    return {f"{Path(row['file_name']).stem}_{page}" for page in row["reference_page"]}


def page_part(reader: Reader, page_id: str, box: tuple, width: int) -> bytes:
    """Return a part of a page at a width in pixels, as a policy sees it."""
    page = reader.pages[page_id].render(2.0)
    x1, y1, x2, y2 = (2.0 * side for side in box)
    size = width, round(width * (y2 - y1) / (x2 - x1))
    file = io.BytesIO()
    page.resize(size, Image.Resampling.BICUBIC, (x1, y1, x2, y2)).save(file, "PNG")
    return file.getvalue()


def test_the_data_is_small_and_its_questions_are_told_apart(rows: dict, keys: list[Key]) -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 1_500_000
    assert {key.question for key in keys} == rows.keys()
    assert len({row["id"] for row in rows.values()}) == len(rows)
    assert sum(row["id"].startswith("q") for row in rows.values()) == 95
    assert sum(len(row["reference_page"]) > 1 for row in rows.values()) >= 8
    assert sum(bool(row["alternatives"]) for row in rows.values()) >= 20
    assert sum(not row["question"].isascii() for row in rows.values()) >= 20


def test_the_final_test_is_of_documents_and_questions_of_its_own(rows: dict) -> None:
    final = rows_of(FINAL_TEST)
    assert list(final) == [final_question.question for final_question in final_questions()]
    assert list(final) == [key.question for key in read_keys(FINAL_KEYS)]
    files = {path.name for path in FINAL_CORPUS.iterdir()}
    assert {row["file_name"] for row in final.values()} == files
    assert not files & {path.name for path in CORPUS.iterdir()}
    assert not final.keys() & rows.keys()
    kinds = Counter(row["question_type"] for row in final.values())
    assert kinds == {"figure": 27, "comparison": 6, "small print": 19}
    assert sum(bool(row["alternatives"]) for row in final.values()) >= 6
    assert sum(not row["question"].isascii() for row in final.values()) >= 12


def test_the_questions_of_the_evidence_are_many_and_about_the_documents_of_the_final_test(
    rows: dict,
) -> None:
    new = rows_of(NEW_QUESTIONS)
    assert list(new) == [key.question for key in read_keys(NEW_KEYS)]
    assert len(new) == 320
    assert {row["file_name"] for row in new.values()} == {
        path.name for path in FINAL_CORPUS.iterdir()
    }
    assert not new.keys() & (rows.keys() | rows_of(FINAL_TEST).keys())
    kinds = Counter(row["question_type"] for row in new.values())
    assert kinds == {"figure": 220, "small print": 100}


@pytest.mark.parametrize(
    "files", [(KEYS, TRAIN, HELDOUT), (FINAL_KEYS, FINAL_TEST), (NEW_KEYS, NEW_QUESTIONS)]
)
def test_each_answer_stands_on_the_gold_pages(reader: Reader, files: tuple[Path, ...]) -> None:
    rows = rows_of(*files[1:])
    for key in read_keys(files[0]):
        row = rows[key.question]
        read = []
        for spots in key.reads:
            text_by_page = {
                spot.page_id: reader.pages[spot.page_id].text_at(spot.box) for spot in spots
            }
            assert len(set(text_by_page.values())) == 1, "pages disagree"
            read.append(next(iter(text_by_page.values())))
            assert text_by_page.keys() & gold(row)
        assert key.answer(read) == row["reference_answer"]
        for page, alternatives in row["alternatives"].items():
            assert page in gold(row)
            assert set(alternatives) <= reader.pages.keys() - gold(row)


@pytest.mark.parametrize("path", [KEYS, FINAL_KEYS])
def test_small_print_is_read_in_a_crop_alone(reader: Reader, path: Path) -> None:
    keys = read_keys(path)
    heights = [
        reader.pages[spot.page_id].letter_height(spot.box)
        for key in keys
        for spots in key.reads
        for spot in spots
    ]
    assert {round(height, 1) for height in heights} == {5.5, 14.0}
    assert 5.5 * 1280 / WIDTH < LEGIBLE < 14.0 * 640 / WIDTH
    small = [k for k in keys if reader.pages[(s := k.reads[0][0]).page_id].letter_height(s.box) < 6]
    assert len(small) >= 19
    spot = small[0].reads[0][0]
    page = reader.pages[spot.page_id]
    assert not is_legible(Sight(page, FULL_PAGE, 1280 / WIDTH), spot.box)
    left = min(spot.box[0], WIDTH / 2)
    half = (left, 400, left + WIDTH / 2, HEIGHT)
    assert is_legible(Sight(page, half, 844 / (WIDTH / 2)), spot.box)


@pytest.mark.parametrize(
    ("width", "page_ids"),
    [
        (640, ("life-expectancy_4", "국가_개요_8", "샌프란시스코_기온_8", "샌프란시스코_기온_9")),
        (844, ("us-employment_7", "airfields_5")),
        (1280, ("시애틀_강수_2", "wheat-and-wages_3")),
    ],
)
def test_a_whole_page_is_known_again(reader: Reader, width: int, page_ids: tuple[str, ...]) -> None:
    for page_id in page_ids:
        sight = reader.locate(page_part(reader, page_id, FULL_PAGE, width))
        assert sight is not None
        assert sight.page.page_id == page_id
        assert all(abs(a - b) < 3 for a, b in zip(sight.region, FULL_PAGE, strict=True))


def test_a_crop_is_found_where_it_was_cut(reader: Reader, keys: list[Key]) -> None:
    """Check crops around numbers in tables and small print, where near-duplicates differ."""
    near_duplicates = [key for key in keys if key.question.startswith("1962년")]
    assert len(near_duplicates) == 2
    for key in [*keys[6:60:18], *near_duplicates, *read_keys(FINAL_KEYS)[3::16]]:
        spot: Spot = key.reads[0][0]
        x1, y1, x2, y2 = spot.box
        cut = (max(x1 - 130, 0), max(y1 - 55, 0), min(x2 + 130, WIDTH), min(y2 + 30, HEIGHT))
        sight = reader.locate(page_part(reader, spot.page_id, cut, 700))
        assert sight is not None
        assert sight.page.page_id == spot.page_id
        assert all(abs(a - b) < 3 for a, b in zip(sight.region, cut, strict=True))
        assert reader.text_in([sight], spot.page_id, spot.box)


def test_what_is_no_page_of_the_corpus_is_not_read(reader: Reader) -> None:
    flat, noise = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (400, 300), "white").save(flat, "PNG")
    Image.effect_noise((400, 300), 90).convert("RGB").save(noise, "PNG")
    assert reader.locate(flat.getvalue()) is None
    assert reader.locate(noise.getvalue()) is None
    assert reader.locate(b"no picture") is None
