"""Check the demo's verifier, a reader with a configured error rate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from demo.search.answer_keys import read_keys
from demo.search.loop.verifier import Verifying
from demo.search.reading import HEIGHT, WIDTH, Reader, Sight
from trainer.search.steps.verify import read_opinion

SEEDS = range(3)
KEY_SUBSET = read_keys()[::3]


@pytest.fixture(scope="module", autouse=True)
def one_reader() -> Iterator[None]:
    """Let all verifiers share one reader, which draws each page once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("demo.search.answering.Reader", cache(Reader))
        yield


class Seeing(Verifying):
    """A verifier that always sees full, close views of the pages of a question."""

    def full_views(self, key):
        pages = dict.fromkeys(spots[0].page_id for spots in key.reads)
        return [Sight(self.reader.pages[page], (0.0, 0.0, WIDTH, HEIGHT), 4.0) for page in pages]

    def says(self, key, seed):
        text = self.answer_seeing(key.question, self.full_views(key), seed)
        assert read_opinion(text, len(self.full_views(key))) is not None
        return json.loads(text)


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    reader = Seeing(error=0, unsure=0)
    return {key.question: reader.says(key, 0)["answer"] for key in KEY_SUBSET}


def test_without_errors_it_reads_what_the_generator_reads(right):
    reader = Seeing(error=0, unsure=0)
    for key in KEY_SUBSET:
        sights = reader.full_views(key)
        assert right[key.question] == reader.answer_from(key.question, sights)


def test_it_errs_as_often_as_it_is_told_and_half_of_that_each_time(right):
    error = 0.2
    reader = Seeing(error=error, unsure=0.05, seed=3)
    counts, stubborn = Counter(), 0
    keys = KEY_SUBSET
    for key in keys:
        opinions = [reader.says(key, seed) for seed in SEEDS]
        for opinion in opinions:
            wrong = opinion["answer"] != right[key.question]
            counts["unsure" if not opinion["sure"] else "wrong" if wrong else "right"] += 1
        sure = [opinion["answer"] for opinion in opinions if opinion["sure"]]
        stubborn += bool(sure) and all(answer != right[key.question] for answer in sure)
    total = counts.total()
    # four standard errors of a share
    assert abs(counts["unsure"] / total - 0.05) < 4 * (0.05 * 0.95 / total) ** 0.5
    assert abs(counts["wrong"] / total - 0.95 * error) < 4 * (error / len(keys)) ** 0.5
    assert abs(stubborn / len(keys) - error / 2) < 4 * (error / 2 / len(keys)) ** 0.5


def test_it_says_the_same_to_the_same_and_seeds_differ(right):
    first_reader, equal_reader, other_reader = (Seeing(error=0.2, seed=seed) for seed in (1, 1, 2))
    keys = KEY_SUBSET[:40]
    opinions = [
        [reader.says(key, 0) for key in keys]
        for reader in (first_reader, equal_reader, other_reader)
    ]
    assert opinions[0] == opinions[1] != opinions[2]


def test_what_is_not_legible_or_not_asked_it_is_not_sure_of():
    reader = Seeing(error=0, unsure=0)
    (key, *_) = read_keys()
    for question, sights in ((key.question, []), ("Who are you?", reader.full_views(key))):
        assert not json.loads(reader.answer_seeing(question, sights, 0))["sure"]
