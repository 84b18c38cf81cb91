"""Check that the demo's generator is right if it sees the fact and wrong otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.search.answer_keys import FINAL_KEYS, KEYS, Key, read_keys
from demo.search.answering import NOT_SHOWN, Answerer
from demo.search.make_corpus import FINAL_TEST, HELDOUT, TRAIN
from demo.search.reading import CORPUS, FINAL_CORPUS, HEIGHT, WIDTH, Sight
from evidence.search.new_documents.questions import KEYS as NEW_KEYS
from evidence.search.new_documents.questions import QUESTIONS as NEW_QUESTIONS

FULL_PAGE = (0.0, 0.0, WIDTH, HEIGHT)
PIXELS_PER_POINT = 844 / WIDTH  # pixels a point of a page as a policy is shown it


FILES = {KEYS: (TRAIN, HELDOUT), FINAL_KEYS: (FINAL_TEST,), NEW_KEYS: (NEW_QUESTIONS,)}
for_each_set = pytest.mark.parametrize("keys", FILES, ids=["demo", "final_test", "new_documents"])


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer((CORPUS, FINAL_CORPUS), tuple(FILES))


@pytest.fixture(scope="module")
def references() -> dict[str, str]:
    lines = [
        line for paths in FILES.values() for file in paths for line in file.open(encoding="utf-8")
    ]
    return {row["question"]: row["reference_answer"] for row in map(json.loads, lines)}


def full_page(answerer: Answerer, page_id: str) -> Sight:
    return Sight(answerer.reader.pages[page_id], FULL_PAGE, PIXELS_PER_POINT)


def crop(answerer: Answerer, page_id: str, box: tuple) -> Sight:
    """Return a quarter of a page around a box, enlarged to the page's size."""
    left = min(max(box[0] - 100, 0), WIDTH - 300)
    region = (left, HEIGHT - 170, left + 300, HEIGHT)
    return Sight(answerer.reader.pages[page_id], region, 844 / 300)


def is_small(answerer: Answerer, key: Key) -> bool:
    spot = key.reads[0][0]
    return answerer.reader.pages[spot.page_id].letter_height(spot.box) < 6


@for_each_set
def test_every_question_is_answered_from_its_pages(
    answerer: Answerer, references: dict[str, str], keys: Path
) -> None:
    crops_needed = 0
    for key in read_keys(keys):
        sights = [full_page(answerer, spots[0].page_id) for spots in key.reads]
        if is_small(answerer, key):
            page_ids = {spot.page_id for spots in key.reads for spot in spots}
            if not any(
                answerer.reader.pages[spot.page_id].letter_height(spot.box) > 6
                for spots in key.reads
                for spot in spots
            ):
                everything = [full_page(answerer, page_id) for page_id in page_ids]
                assert answerer.answer_from(key.question, everything) != references[key.question]
                crops_needed += 1
            spot = key.reads[0][0]
            sights.append(crop(answerer, spot.page_id, spot.box))
        assert answerer.answer_from(key.question, sights) == references[key.question]
    assert crops_needed >= 19


@for_each_set
def test_other_pages_give_another_answer(
    answerer: Answerer, references: dict[str, str], keys: Path
) -> None:
    """Check all pages without the fact, each at the size of a crop."""
    for key in read_keys(keys)[:: 8 if keys == KEYS else 4]:
        carry = {spot.page_id for spots in key.reads for spot in spots}
        sights = [
            Sight(page, FULL_PAGE, 3.0)
            for page_id, page in answerer.reader.pages.items()
            if page_id not in carry
        ]
        assert answerer.answer_from(key.question, sights) != references[key.question]


@for_each_set
def test_one_of_two_pages_is_not_enough(
    answerer: Answerer, references: dict[str, str], keys: Path
) -> None:
    for key in read_keys(keys):
        if len({spots[0].page_id for spots in key.reads}) > 1:
            sight = full_page(answerer, key.reads[0][0].page_id)
            assert answerer.answer_from(key.question, [sight]) != references[key.question]


def test_without_pictures_or_a_known_question_nothing_is_invented(answerer: Answerer) -> None:
    key = read_keys()[0]
    assert answerer.answer(key.question, []) == NOT_SHOWN
    assert answerer.answer(key.question, [b"no picture"]) == NOT_SHOWN
    guess = answerer.answer_from("Who won?", [full_page(answerer, key.reads[0][0].page_id)])
    assert any(digit in guess for digit in "0123456789")


def test_a_question_is_found_in_what_stands_around_it(
    answerer: Answerer, references: dict[str, str]
) -> None:
    key = read_keys()[0]
    sights = [full_page(answerer, spots[0].page_id) for spots in key.reads]
    prompt = f"Answer from the images.\n\nQuestion:  {key.question}\nAnswer:"
    assert answerer.answer_from(prompt, sights) == references[key.question]
