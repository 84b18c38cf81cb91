"""What a stored value must be to stand in an answer, whoever wrote it."""

from __future__ import annotations

from pydantic_core import to_json

from scorekit.schemas import JudgeSample, ScoreRange, TranslationSample, XCometOptions
from scorekit.server.stored import MAX_VALUE_BYTES, could_be_answer

SAMPLE = TranslationSample(src="The house", mt="집은 빨간색")
TRUNCATED = {"src": False, "mt": False, "ref": False}
SPAN = {"start": 3, "end": 6, "severity": "MAJOR", "confidence": 0.5, "text": "빨간색"}
GOOD = {
    "score": 0.5,
    "error_spans": [SPAN],
    "tokens": 9,
    "truncated": TRUNCATED,
    "mt_covered": 6,
}


def _counts(value, sample=SAMPLE, **options):
    stored = value if isinstance(value, bytes) else to_json(value)
    return could_be_answer(stored, sample, XCometOptions(**options), ScoreRange(min=None, max=1.0))


def test_what_a_service_writes_counts():
    assert _counts(GOOD)
    assert _counts(GOOD | {"error_spans": []})
    assert _counts({name: value for name, value in GOOD.items() if name != "error_spans"})
    judged = {"score": 1.0, "verdict": {"pass": True, "reason_code": "ok", "notes": ""}}
    assert _counts(judged, JudgeSample(task="translation_filter"))


def test_what_no_service_could_have_written_does_not():
    def span(**other):
        return {"error_spans": [SPAN | other]}

    for forged in (
        {"score": 1.5},
        {"score": True},
        {"score": "0.5"},
        {"tokens": -1},
        {"tokens": "9"},
        {"tokens": None},
        {"mt_covered": 7},
        {"mt_covered": -1},
        {"truncated": None},
        {"truncated": {"src": 1}},
        {"more": "text"},
        {"id": "x"},
        {"verdict": {}},
        {"error_spans": "none"},
        {"error_spans": [3]},
        span(end=7),
        span(start=-1),
        span(start=6),
        span(text="something else"),
        span(severity=3),
        span(confidence=1.5),
        span(severity="<SCRIPT>"),
        span(severity="major"),
        span(more="text"),
        span(confidence=None),
        span(text=None),
        {"truncated": TRUNCATED | {"more": True}},
        {"error_spans": [SPAN, SPAN]},
        {"error_spans": [SPAN | {"text": "x" * MAX_VALUE_BYTES}]},
    ):
        assert not _counts(GOOD | forged), forged
    assert not _counts({"score": 0.5})
    verdict = {"pass": True, "reason_code": "ok", "notes": "", "more": "text"}
    assert not _counts({"score": 1.0, "verdict": verdict}, JudgeSample(task="translation_filter"))
    assert not _counts(GOOD, JudgeSample(task="translation_filter"))
    assert not _counts(to_json(GOOD).replace(b"0.5", b'0.5,"score":0.25', 1))  # of two names one


def test_raw_spans_lie_in_the_text_and_need_not_quote_it():
    raw = GOOD | {"error_spans": [SPAN | {"start": 2, "text": " 빨간색"}]}
    assert _counts(raw, span_offsets="upstream")
    assert _counts(GOOD | {"error_spans": [SPAN | {"text": "x"}]}, span_offsets="upstream")
    assert not _counts(GOOD | {"error_spans": [SPAN | {"end": 7}]}, span_offsets="upstream")
