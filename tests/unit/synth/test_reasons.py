"""Check the meanings of reason codes, and that a code is a plain text wherever it is written."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from scorekit.errors import SAMPLE_ERROR_TYPES
from scorekit.llm.errors import LLM_ERROR_TYPES
from services.judge.rubrics import load_rubrics
from services.judge.rules import _RULES
from synth.reasons import FAILURES, UNKNOWN, VERDICTS, Family, Reason, RuleCode, explain

#: Ends of each family's codes.
ENDS = {
    Family.GREEDY: [RuleCode.EMPTY, Reason.CUT, Family.SCORE.code("non_finite")],
    Family.SAMPLE: [Reason.LOOPING, Reason.CONTENT_FILTER, Family.SCORE.code("overlong")],
    Family.TEACHER: LLM_ERROR_TYPES,
    Family.SCORE: SAMPLE_ERROR_TYPES,
    Family.JUDGE: SAMPLE_ERROR_TYPES,
    Family.JUDGE_ERROR: SAMPLE_ERROR_TYPES,
    Family.JUDGE_VERDICT: ["a_word_of_its_own", *VERDICTS],
    Family.DOUBT_PASSED: RuleCode,
    Family.DOUBT_REFUSED: RuleCode,
    Family.DOUBT_UNJUDGED: RuleCode,
}


@pytest.mark.parametrize("family", [None, *Family])
def test_each_code_is_explained_in_one_sentence(family):
    codes = [family.code(end) for end in ENDS[family]] if family else [*Reason, *RuleCode]
    for code in codes:
        explanation = explain(str(code))
        assert re.fullmatch(r"[A-Z][^\n]{10,140}\.", explanation), explanation
        assert "{" not in explanation and UNKNOWN[:-1] not in explanation


def test_no_code_stands_for_two_reasons():
    codes = [*Reason, *RuleCode]
    assert len(set(codes)) == len(codes) == len(Reason.__members__) + len(RuleCode.__members__)


def test_a_code_is_written_as_its_text():
    code = Reason.NO_BUCKET
    assert json.dumps({code: code}) == '{"no_bucket": "no_bucket"}'
    assert f"{code} {Family.GREEDY.code(Reason.CUT)}" == "no_bucket greedy_cut"
    assert {"no_bucket": 1}[code] == 1 and pickle.loads(pickle.dumps(code)) is code


def test_every_word_of_the_rubric_and_of_the_rules_has_its_explanation():
    reasons = load_rubrics()["translation_filter"].score.fail_reasons
    assert {*reasons, *_RULES} <= set(VERDICTS)
    assert {*LLM_ERROR_TYPES, *SAMPLE_ERROR_TYPES} == set(FAILURES)


def test_a_code_of_another_version_stops_no_report():
    assert explain("no_such_code") == UNKNOWN
    assert "does not know" in explain("teacher_eloped")
