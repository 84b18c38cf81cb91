"""Check a generator that knows some answers by heart, and that pages may distract it."""

from __future__ import annotations

import json
from functools import cache

import pytest

from demo.search.loop.knowing import KnowingAnswerer, is_known
from demo.search.make_corpus import TRAIN
from demo.search.reading import HEIGHT, WIDTH, Reader, Sight


def test_pages_without_the_fact_distract_it_from_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("demo.search.answering.Reader", cache(Reader))
    rows = [json.loads(line) for line in TRAIN.read_text("utf-8").splitlines()]
    memorized_ids = {row["id"] for row in rows if is_known(row["question"], 4)}
    assert 0.15 < len(memorized_ids) / len(rows) < 0.35
    undistracted, half_distracted, distracted = (
        KnowingAnswerer((TRAIN,), one_in=4, distracted=share) for share in (0.0, 0.5, 1.0)
    )
    other_page = next(iter(undistracted.reader.pages.values()))
    far = [Sight(other_page, (0.0, 0.0, WIDTH, HEIGHT), 0.01)]  # no letter of it is legible

    def right(answerer: KnowingAnswerer, sights: list[Sight]) -> set[str]:
        answers = {row["id"]: answerer.answer_from(row["question"], sights) for row in rows}
        return {row["id"] for row in rows if answers[row["id"]] == row["reference_answer"]}

    assert (
        right(distracted, [])
        == right(undistracted, [])
        == right(undistracted, far)
        == memorized_ids
    )
    assert not right(distracted, far)
    assert 0.2 < len(right(half_distracted, far)) / len(memorized_ids) < 0.8
