"""Rules are measured on labelled pairs as they occur in practice, one half of them unseen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scorekit.text.rules import Pair
from synth.filters import RuleConfig, check_rules

FOLDER = Path(__file__).parents[2] / "data/practice"
#: Errors of meaning, which no rule can see.
FOR_A_JUDGE = ("mistranslation", "role_swapped", "literal_translation")


def outcome(row: dict[str, str]) -> str:
    """Return what becomes of a pair: refused, refused without a judge, doubted or accepted."""
    pair = Pair(row["src"], row["mt"], row["src_lang"], row["tgt_lang"])
    with_judge = check_rules(pair, RuleConfig(), has_judge=True)
    if with_judge.failed:
        return "refused"
    if check_rules(pair, RuleConfig()).failed:
        return "refused without a judge"
    return "doubted" if with_judge.doubtful else "accepted"


@pytest.mark.parametrize(
    ("half", "right_refused", "right_refused_alone", "wrong_accepted", "rule_errors_accepted"),
    # Before these rules: 0, 10, 99, 72 and 3, 13, 104, 75.
    [("work", 0, 2, 54, 25), ("unseen", 2, 5, 62, 32)],
)
def test_few_right_pairs_are_refused_and_errors_of_form_are_seen(
    half, right_refused, right_refused_alone, wrong_accepted, rule_errors_accepted
):
    """Bound the errors of both kinds by what was measured; a bound may fall."""
    rows = [json.loads(line) for line in (FOLDER / f"{half}.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) > 300
    right = Counter(outcome(row) for row in rows if row["right"])
    wrong = [row for row in rows if not row["right"] and outcome(row) == "accepted"]
    assert right["refused"] <= right_refused
    assert right["refused"] + right["refused without a judge"] <= right_refused_alone
    assert len(wrong) <= wrong_accepted
    of_form = [row for row in wrong if row["error_kind"] not in FOR_A_JUDGE]
    assert len(of_form) <= rule_errors_accepted
