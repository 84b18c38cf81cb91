"""Check the share of English words, and everyday English in the rule that uses it."""

from __future__ import annotations

import pytest

from bench.synth.planted import HALVES, everyday, everyday_others
from scorekit.text.english_words import english_share
from synth.filters import RuleConfig, check_rules
from synth.reasons import RuleCode

#: Lines of each half that the rule may doubt; without the list they were 18 and 20.
MOST_DOUBTED = {"work": 2, "unseen": 7}


def test_words_that_other_languages_have_do_not_count():
    assert english_share("His bike was stolen.") > 0.5
    assert english_share("Mit Familie im Haus") == english_share("12 – 3") == 0.0
    assert english_share("These words löschen") == 0.0
    assert english_share("Palace") == 0.0 < english_share("Palace", has_names=True)


@pytest.mark.parametrize("half", HALVES)
def test_everyday_english_is_seldom_taken_for_another_language(half):
    doubted = [pair.mt for pair in everyday(half) if _is_doubted(pair)]
    assert len(doubted) <= MOST_DOUBTED[half], doubted


def test_everyday_texts_of_other_languages_are_still_found():
    passed = [pair.mt for pair in everyday_others() if not check_rules(pair, RuleConfig()).failed]
    assert len(passed) <= 2, passed


def _is_doubted(pair):
    return RuleCode.WRONG_LANGUAGE in check_rules(pair, RuleConfig()).failed
