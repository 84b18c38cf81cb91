"""Test the committed search policy, from which reinforcement learning starts."""

from __future__ import annotations

import asyncio

import pytest

from demo.common import MODELS
from demo.search.make_corpus import HELDOUT
from demo.train.search.policy import CONFIG, questions_of
from demo.train.search.questions import bare
from scorekit.config import load_config
from trainer.search.config import SearchConfig
from trainer.search.records import Question
from trainer.search.rollout.actions import Invalid, Search, parse
from trainer.search.rollout.episode import TurnOutput, TurnRequest
from trainer.search.rollout.prompt import opening
from trainer.search.rollout.sampled import local_policy

SAMPLES = 4


@pytest.fixture(scope="module")
def turns() -> list[tuple[str, str]]:
    """Return (question, a first turn) of every held-out question, several times."""
    cfg = load_config(SearchConfig, CONFIG, [f"policy.path={MODELS / 'search_policy'}"])
    policy = local_policy(cfg)
    questions = questions_of(HELDOUT) * SAMPLES
    turn_requests = [
        TurnRequest(
            str(number),
            1,
            opening(
                Question(id="q", question=question, reference_answer="-", gold=()), cfg.episode
            ),
            None,
            cfg.episode.max_response_length,
        )
        for number, question in enumerate(questions)
    ]

    async def all_turns() -> list[TurnOutput]:
        return await asyncio.gather(*map(policy.turn, turn_requests))

    return list(zip(questions, (turn.text for turn in asyncio.run(all_turns())), strict=True))


def test_most_turns_are_well_formed_and_some_are_not(turns) -> None:
    """Check that training can make it both worse and better."""
    broken = [text for _, text in turns if isinstance(parse(text), Invalid)]
    assert 0.03 < len(broken) / len(turns) < 0.6


def test_queries_are_words_of_questions_that_it_has_never_read(turns) -> None:
    num_shared = total = 0
    for question, text in turns:
        if isinstance(action := parse(text), Search):
            words = {bare(word) for word in question.split()}
            num_shared += sum(word in words for word in action.query.split())
            total += len(action.query.split())
    assert total > len(turns) and num_shared / total > 0.6
