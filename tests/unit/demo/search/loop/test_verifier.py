"""The demo's verifier: a reader that errs by itself, as often as it is told to."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from demo.search.answer_keys import read_keys
from demo.search.loop.verifier import Verifying
from demo.search.reading import HEIGHT, WIDTH, Sight
from trainer.search.curation.verification.verifier import read_opinion

SEEDS = range(3)
SOME = read_keys()[::3]


class Seeing(Verifying):
    """Sees the pages of a question whole and close, whatever it is shown."""

    def shown(self, key):
        pages = dict.fromkeys(spots[0].page_id for spots in key.reads)
        return [Sight(self.reader.pages[page], (0.0, 0.0, WIDTH, HEIGHT), 4.0) for page in pages]

    def says(self, key, seed):
        text = self.answer_seeing(key.question, self.shown(key), seed)
        assert read_opinion(text, len(self.shown(key))) is not None
        return json.loads(text)


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    reader = Seeing(error=0, unsure=0)
    return {key.question: reader.says(key, 0)["answer"] for key in SOME}


def test_without_errors_it_reads_what_the_generator_reads(right):
    reader = Seeing(error=0, unsure=0)
    for key in SOME:
        sights = reader.shown(key)
        assert right[key.question] == reader.answer_from(key.question, sights)


def test_it_errs_as_often_as_it_is_told_and_half_of_that_each_time(right):
    error = 0.2
    reader = Seeing(error=error, unsure=0.05, seed=3)
    counts, stubborn = Counter(), 0
    keys = SOME
    for key in keys:
        said = [reader.says(key, seed) for seed in SEEDS]
        for one in said:
            wrong = one["answer"] != right[key.question]
            counts["unsure" if not one["sure"] else "wrong" if wrong else "right"] += 1
        sure = [one["answer"] for one in said if one["sure"]]
        stubborn += bool(sure) and all(answer != right[key.question] for answer in sure)
    total = counts.total()
    # four standard errors of a share
    assert abs(counts["unsure"] / total - 0.05) < 4 * (0.05 * 0.95 / total) ** 0.5
    assert abs(counts["wrong"] / total - 0.95 * error) < 4 * (error / len(keys)) ** 0.5
    assert abs(stubborn / len(keys) - error / 2) < 4 * (error / 2 / len(keys)) ** 0.5


def test_it_says_the_same_to_the_same_and_seeds_differ(right):
    one, two, other = (Seeing(error=0.2, seed=seed) for seed in (1, 1, 2))
    keys = SOME[:40]
    said = [[reader.says(key, 0) for key in keys] for reader in (one, two, other)]
    assert said[0] == said[1] != said[2]


def test_what_is_not_legible_or_not_asked_it_is_not_sure_of():
    reader = Seeing(error=0, unsure=0)
    (key, *_) = read_keys()
    for question, sights in ((key.question, []), ("Who are you?", reader.shown(key))):
        assert not json.loads(reader.answer_seeing(question, sights, 0))["sure"]
