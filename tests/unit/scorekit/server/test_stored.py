"""Check which stored values are valid answers, whatever wrote them."""

from __future__ import annotations

from pydantic_core import to_json

from scorekit.schemas import JudgeSample, ScoreRange, TranslationSample, XCometOptions
from scorekit.server.score_endpoint import MAX_VALUE_BYTES, could_be_answer

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
    max_score = None if getattr(sample, "task", "") == "mqm" else 1.0
    return could_be_answer(
        stored, sample, XCometOptions(**options), ScoreRange(min=None, max=max_score)
    )


def test_what_a_service_writes_counts():
    assert _counts(GOOD)
    assert _counts(GOOD | {"error_spans": []})
    assert _counts({name: value for name, value in GOOD.items() if name != "error_spans"})
    judged = {"score": 1.0, "verdict": {"pass": True, "reason_code": "ok", "notes": ""}}
    assert _counts(judged, JudgeSample(task="translation_filter"))


def test_errors_that_a_judge_found_lie_in_both_texts():
    sample = JudgeSample(task="mqm", src="The house", mt="집은 빨간색")
    left = {"start": 4, "end": 9, "severity": "MAJOR", "confidence": None, "text": "house"}
    stored = GOOD | {"error_spans": [SPAN | {"confidence": None}], "omissions": [left]}
    assert _counts(stored, sample)
    assert not _counts(stored | {"omissions": [left | {"end": 10}]}, sample)
    assert not _counts(stored | {"omissions": [left | {"text": "other"}]}, sample)
    assert not _counts(stored)  # xCOMET always has a confidence
    verdict = {"pass": True, "reason_code": "ok", "notes": ""}
    assert not _counts({"score": 0.0, "verdict": verdict}, sample)
    assert not _counts(stored, JudgeSample(task="own", src="The house", mt="집은 빨간색"))


def test_windows_lie_in_both_texts():
    window = {"src_start": 0, "src_end": 9, "mt_start": 0, "mt_end": 6, "score": 0.5}
    assert _counts(GOOD | {"windows": [window]})
    for other in ({"src_end": 10}, {"mt_end": 7}, {"mt_start": -1}, {"src_start": 10}):
        assert not _counts(GOOD | {"windows": [window | other]}), other


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
    assert not _counts(to_json(GOOD).replace(b"0.5", b'0.5,"score":0.25', 1))  # a repeated key


def test_raw_spans_lie_in_the_text_and_need_not_quote_it():
    raw = GOOD | {"error_spans": [SPAN | {"start": 2, "text": " 빨간색"}]}
    assert _counts(raw, span_offsets="upstream")
    assert _counts(GOOD | {"error_spans": [SPAN | {"text": "x"}]}, span_offsets="upstream")
    assert not _counts(GOOD | {"error_spans": [SPAN | {"end": 7}]}, span_offsets="upstream")
