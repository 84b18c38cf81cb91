"""Check how a file of scores is joined with the judged translations."""

from __future__ import annotations

import json

import pytest

from scorekit.client.files.metrics import MetricSource
from scorekit.errors import UserError
from scorekit.metaeval.judgements import JudgedTranslation
from scorekit.metaeval.metrics import file_scores

TRANSLATIONS = [
    JudgedTranslation("A", "1", "집", "a house"),
    JudgedTranslation("B", "1", "집", "hut"),
]


def _scores(tmp_path, *rows):
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file_scores(MetricSource("m", str(path)), TRANSLATIONS, True)


def _row(mt="a house", score=1.0, **other):
    return {"src": "집", "mt": mt, "score": score} | other


@pytest.mark.parametrize(
    ("second", "name"),
    [
        (_row(score=2.0), "score"),
        (_row(score=None), "score"),
        (_row(ok=False), "score"),
        (_row(error_spans=[{"start": 0, "end": 1, "severity": "MAJOR"}]), "error_spans"),
    ],
)
def test_rows_that_differ_about_a_translation_are_refused_by_both_lines(second, name, tmp_path):
    with pytest.raises(UserError, match=rf"scores\.jsonl, lines 1 and 3: .* differ in '{name}'"):
        _scores(tmp_path, _row(), _row(mt="hut", score=5.0), second)


def test_equal_rows_of_a_translation_count_once_and_are_counted(tmp_path):
    scores = _scores(tmp_path, _row(), _row(mt="hut", score=5), _row(), _row(mt="hut", score="5"))
    assert scores.scores == [1.0, 5.0] and scores.repeated == 2


def test_failures_of_a_translation_are_equal(tmp_path):
    failed = _row(score=None, ok=False, error={"type": "model_failure"})
    scores = _scores(tmp_path, failed, failed, _row(mt="hut"))
    assert scores.scores == [None, 1.0] and scores.failed == {"model_failure": 1}
