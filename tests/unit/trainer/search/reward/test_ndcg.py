"""Check the NDCG of the pages displayed in an episode."""

from __future__ import annotations

import random
from itertools import permutations
from math import log2

import pytest

from tests.kits.trainer.searching.finished import crop, episode, page, question
from trainer.search.config import GoldUnit
from trainer.search.reward import ndcg


def ndcg_of_ranks(golds: int, found_at: tuple[int, ...], count: int = 6) -> float | None:
    """Return the NDCG of pages with a gold page at each rank in `found_at`."""
    gold = tuple(f"deck_{number}" for number in range(1, golds + 1))
    waiting = list(gold)
    pages = [waiting.pop(0) if rank in found_at else f"x_{rank}" for rank in range(1, count + 1)]
    return ndcg(pages, question(gold=gold))


@pytest.mark.parametrize(
    ("golds", "found_at", "value"),
    [
        (1, (1,), 1.0),
        (1, (2,), 0.631),
        (1, (3,), 0.5),
        (1, (6,), 0.356),
        (1, (), 0.0),
        (2, (1,), 0.613),
        (2, (2, 3), 0.693),
        (2, (1, 2), 1.0),
        (3, (1,), 0.469),
        (3, (1, 2, 3), 1.0),
    ],
)
def test_values(golds: int, found_at: tuple[int, ...], value: float) -> None:
    assert ndcg_of_ranks(golds, found_at) == pytest.approx(value, abs=5e-4)


def test_a_question_without_gold_pages_has_no_value() -> None:
    assert ndcg(["deck_1"], question(gold=())) is None
    assert ndcg([], question()) == 0.0


def test_the_order_shown_counts_and_not_the_rank_of_the_engine() -> None:
    sample = episode(shown=("deck_1", "deck_2"))
    sample.turns[1].rank = 9
    assert ndcg(sample.shown_pages, sample.question) == pytest.approx(0.631, abs=5e-4)


def test_a_page_shown_again_and_a_crop_take_no_rank() -> None:
    sample = episode(shown=("deck_1", "deck_3", "deck_2"))
    sample.turns[1].views = [page("deck_1"), crop("deck_1", "a crop")]
    assert sample.shown_pages == ["deck_1", "deck_2"]
    assert ndcg(["deck_1", "deck_1", "deck_2"], sample.question) == pytest.approx(0.631, abs=5e-4)


def test_a_document_counts_once() -> None:
    source = question(gold=("deck_2", "deck_5"))
    assert ndcg(["deck_1", "deck_3"], source, "page") == 0
    assert ndcg(["deck_1", "deck_3"], source, "document") == 1
    assert ndcg(["x_1", "deck_3", "deck_2"], source, "document") == pytest.approx(1 / log2(3))
    two = question(gold=("a_b_2", "c_1"))
    assert ndcg(["a_b_9", "a_b_8", "c_7"], two, "document") == pytest.approx(
        (1 + 1 / 2) / (1 + 1 / log2(3))
    )


def test_an_alternative_stands_for_its_gold_page_once() -> None:
    source = question(gold=("a_1", "b_1"), alternatives={"a_1": ("x_1", "y_1"), "b_1": ("x_1",)})
    assert ndcg(["x_1", "y_1"], source, "page") == 0
    assert ndcg(["x_1", "y_1"], source, "alternatives") == pytest.approx(1)
    assert ndcg(["y_1", "a_1"], source, "alternatives") == pytest.approx(1 / (1 + 1 / log2(3)))
    # x first counts as a, then as b once a itself is displayed.
    assert ndcg(["x_1", "a_1"], source, "alternatives") == pytest.approx(1)


def best_pairing(pages: list[str], golds: list[set[str]]) -> float:
    """Return the best NDCG over all pairings of pages and gold pages."""
    best = 0.0
    for order in permutations([*range(len(golds)), *[-1] * len(pages)], len(pages)):
        gains = [
            1 / log2(rank + 1)
            for rank, (page, index) in enumerate(zip(pages, order, strict=True), 1)
            if index >= 0 and page in golds[index]
        ]
        best = max(best, sum(gains))
    return best


def test_the_value_is_that_of_the_best_pairing_and_within_one() -> None:
    dice = random.Random(7)
    names = [f"p_{number}" for number in range(5)]
    for _ in range(150):
        gold = tuple(dice.sample(names, dice.randint(1, 3)))
        alternatives = {page: tuple(dice.sample(names, dice.randint(0, 3))) for page in gold}
        pages = dice.sample(names, dice.randint(0, 4))
        value = ndcg(pages, question(gold=gold, alternatives=alternatives), "alternatives")
        ideal = sum(1 / log2(rank + 1) for rank in range(1, len(gold) + 1))
        accepted = [{page, *alternatives[page]} for page in gold]
        assert value == pytest.approx(best_pairing(pages, accepted) / ideal)
        assert 0 <= value <= 1 + 1e-12


@pytest.mark.parametrize("gold", ["page", "document", "alternatives"])
def test_every_unit_agrees_where_there_is_nothing_to_choose(gold: GoldUnit) -> None:
    assert ndcg(["a_1", "deck_2"], question(), gold) == pytest.approx(0.631, abs=5e-4)
