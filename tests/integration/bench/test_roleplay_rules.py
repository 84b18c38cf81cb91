"""The Korean role-play rules reach the accuracy stated in docs/explanation/roleplay-rewards.md."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.roleplay_rules.accuracy import (
    DECISIONS,
    HALVES,
    measure_decision,
    read_sentences,
)
from trainer.roleplay.korean.questions import asks

#: For both halves: a rule's result on the first run over the unseen half, rounded down.
FLOOR = {"player_name_rule: subject": 0.95, "the user asks": 0.96}
ELSE = 0.98


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: decision.title)
def test_each_rule_is_right_on_labeled_sentences(decision, half):
    result = measure_decision(decision, half)
    print(*result.errors, sep="\n")
    assert result.num_sentences >= 100
    assert result.accuracy >= FLOOR.get(decision.title, ELSE)


@pytest.mark.parametrize("half", HALVES)
def test_a_question_is_seldom_seen_where_none_is_asked(half):
    """Check false positives, which cost a full reward."""
    (decision,) = (decision for decision in DECISIONS if decision.file == "questions")
    precision = measure_decision(decision, half).precision
    assert precision is not None and precision >= 0.95
    unclear = [row.text for row in read_sentences("questions", half) if row.label == "ambiguous"]
    assert len(unclear) >= 10 and not any(map(asks, unclear))


@pytest.mark.parametrize("file", ["names", "questions", "speech"])
def test_each_set_has_200_sentences_and_no_sentence_twice(file):
    texts = Counter(row.text for half in HALVES for row in read_sentences(file, half))
    assert len(texts) >= 200 and set(texts.values()) == {1}
