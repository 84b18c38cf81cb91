"""Check which pages an answer rests on."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.finished import episode, page, question, sha256_of
from trainer.search.curation.config_sections import HallucinationsConfig
from trainer.search.curation.samples import evidence_pages, has_evidence, sample_of
from trainer.search.diagnosis.hallucinations import suspect_of
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Trajectory, Turn


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
    assert evidence_pages(trajectory) == {"deck_1"} and has_evidence(trajectory)


@pytest.mark.parametrize("sent", ["deck_2", "deck_2, larger"])
def test_a_page_of_the_gold_document_is_near_whether_its_original_was_sent_or_not(
    sent: str,
) -> None:
    trajectory = answered("deck_2", sent=sent)
    sample = sample_of(trajectory, 0, "run")
    suspect = suspect_of(trajectory, sample, HallucinationsConfig())
    assert suspect is not None and suspect.near == (sha256_of(sent),)
