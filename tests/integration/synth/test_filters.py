"""Check how often the rules are right on texts whose answer is known."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.filters import DIRECTIONS, is_rejected, seven, third_languages
from scorekit.text.rules import Pair
from synth.filters import RuleConfig, check_rules

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_short_copies_and_third_languages_are_told(source, target):
    """Check the benchmark's targets on texts that were not used to build the table."""
    rows = [row for row in seven() if 10 <= len(row[source]) < 30]
    copies = [Pair(row[source], row[source], source, target) for row in rows]
    true = [Pair(row[source], row[target], source, target) for row in seven()]
    thirds = [pair for pair in third_languages(source, target, 500) if len(pair.mt) >= 10]
    assert min(len(copies), len(true), len(thirds)) > 100
    assert sum(not is_rejected(pair) for pair in copies) <= len(copies) / 100
    assert sum(not is_rejected(pair) for pair in thirds) <= len(thirds) / 50
    assert sum(is_rejected(pair) for pair in true) <= len(true) / 100


def _gold():
    for path in sorted((ROOT / "demo" / "data").glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                target = "de-DE" if "text" in row else "ko-KR"
                mt = row.get("text") or row.get("ref_text")
                if mt and len(row["src_text"].strip()) >= 20:
                    yield Pair(row["src_text"], mt, "en-US", target)


def test_each_rule_rejects_fewer_than_one_in_a_hundred_true_translations():
    pairs = list(_gold())[::3]
    assert len(pairs) > 3000
    rejections = Counter(code for pair in pairs for code in check_rules(pair, RuleConfig()).failed)
    assert not {code: n for code, n in rejections.items() if n >= len(pairs) / 100}
