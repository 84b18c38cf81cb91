"""Check which pages an answer rests on."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.finished import episode, page, question, sha256_of
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Trajectory, Turn
from trainer.search.steps.episodes import has_all_evidence, sample_of
from trainer.search.steps.hallucinations import HallucinationsConfig, suspect_of


def answered(*pages: str, sent: str, gold: str = "deck_1") -> Trajectory:
    """Return an episode that saw pages and was judged right by an answer from one image."""
    views = [
        page(name).model_copy(update={"original": sha256_of(f"{name}, larger")}) for name in pages
    ]
    turns = [Turn(number=1, text="", action="search", views=views)]
    answer = GeneratedAnswer(status="ok", text="12", evidence=[sha256_of(sent)])
    judged = JudgedAnswer(status="ok", score=1.0)
    asked_question = question(gold=(gold,))
    return episode("t1", question=asked_question, turns=turns, answer=answer, judged=judged)


@pytest.mark.parametrize("sent", ["deck_1", "deck_1, larger"])
def test_an_answer_rests_on_a_page_whether_its_original_was_sent_or_not(sent: str) -> None:
    trajectory = answered("deck_1", "deck_2", sent=sent)
    assert trajectory.sent_pages == {"deck_1"} and has_all_evidence(trajectory)


def test_a_gold_page_that_was_shown_and_not_sent_is_no_evidence() -> None:
    unsent = answered("deck_2", "deck_1", sent="deck_2")
    assert unsent.has_unsent_gold and not unsent.answer_has_evidence
    assert not sample_of(unsent, 0, "run").has_evidence
    for other in (answered("deck_2", sent="deck_2"), answered("deck_1", sent="deck_1")):
        assert not other.has_unsent_gold
    unanswered = unsent.model_copy(update={"answer": None})
    assert not unanswered.has_unsent_gold and unanswered.answer_has_evidence


def test_an_alternative_page_counts_as_shown_and_as_sent() -> None:
    twin = question(gold=("deck_1",), alternatives={"deck_1": ("deck_3",)})
    for page_ids, sent, unsent in (
        (("deck_3", "deck_1"), "deck_3", False),
        (("deck_2", "deck_3"), "deck_2", True),
    ):
        trajectory = answered(*page_ids, sent=sent).model_copy(update={"question": twin})
        assert trajectory.has_unsent_gold is unsent
        assert trajectory.answer_has_evidence is not unsent


def test_of_an_episode_without_images_ndcg_tells_whether_it_has_evidence() -> None:
    unseen = answered(sent="deck_1").model_copy(update={"answer": None})
    for ndcg in (0.5, 0.0):
        summary = sample_of(unseen.model_copy(update={"ndcg": ndcg}), 0, "run")
        assert summary.has_evidence is bool(ndcg)
    late = answered("deck_2", "deck_1", sent="deck_2").model_copy(update={"ndcg": 0.5})
    assert not sample_of(late, 0, "run").has_evidence


@pytest.mark.parametrize("sent", ["deck_2", "deck_2, larger"])
def test_a_page_of_the_gold_document_is_near_whether_its_original_was_sent_or_not(
    sent: str,
) -> None:
    trajectory = answered("deck_2", sent=sent)
    sample = sample_of(trajectory, 0, "run")
    suspect = suspect_of(trajectory, sample, HallucinationsConfig())
    assert suspect is not None and suspect.near == (sha256_of(sent),)
