"""Check how subword labels and offsets become spans: each rule and general properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.xcomet.joint import exact_spans, label_runs, mqm_score, upstream_spans

#: Text pieces as a tokenizer may cut them: with leading spaces, wide, invisible, empty.
SEGMENTS = ["Das", " ist", "  ", "한국", " 번역", "🙂", "…", "\u200b", "é", "\n", "", " x", "."]


@st.composite
def tagged_texts(draw):
    """Generate (labels, confidence, offsets, mt) for a text in segments, some repeated."""
    mt, offsets = "", [(0, 0)]
    for segment in draw(st.lists(st.sampled_from(SEGMENTS), max_size=12)):
        start, mt = len(mt), mt + segment
        # A normalizer may turn one character into several subwords with equal offsets.
        offsets += [(start, len(mt))] * draw(st.integers(0 if segment.isspace() else 1, 3))
    offsets.append((0, 0))
    n = len(offsets)
    labels = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    confidence = draw(st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n))
    return np.array(labels), np.array(confidence, np.float32), np.array(offsets), mt


def decode_slowly(labels, confidence, offsets):
    """Decode like `UnifiedMetric.decode` of unbabel-comet 2.2.7, without tensors and texts."""
    spans, span = [], None
    for label, probability, (start, end) in zip(labels, confidence, offsets, strict=True):
        if label and span is None:
            span = [start, end, label, [probability]]
        elif label:
            span[3].append(probability)
            span[1] = end
        elif span is not None:
            spans.append(span)
            span = None
    return spans


@given(tagged_texts())
def test_upstream_spans_are_upstreams(case):
    labels, confidence, offsets, _ = case
    spans = upstream_spans(labels, confidence, offsets)
    expected = decode_slowly(labels.tolist(), confidence.tolist(), offsets.tolist())
    names = ["O", "MINOR", "MAJOR", "CRITICAL"]
    assert [(s.start, s.end, s.severity) for s in spans] == [
        (start, end, names[label]) for start, end, label, _ in expected
    ]
    assert [s.confidence for s in spans] == pytest.approx(
        [sum(p) / len(p) for _, _, _, p in expected], abs=1e-5
    )


@given(tagged_texts())
def test_exact_spans_hold_for_every_text(case):
    """Check that spans equal the text, have visible edges and are ordered and disjoint."""
    labels, confidence, offsets, mt = case
    before = 0
    for span in exact_spans(labels, confidence, offsets, mt):
        assert mt[span["start"] : span["end"]] == span["text"]
        assert span["text"] and span["text"].strip() == span["text"]
        assert before <= span["start"] < span["end"] <= len(mt)
        assert 0 <= span["confidence"] <= 1 + 1e-6
        before = span["end"]


@given(tagged_texts())
def test_exact_spans_lose_and_invent_nothing(case):
    """Check that spans cover the visible characters of tagged subwords and uncovered ones."""
    labels, confidence, offsets, mt = case
    spans = exact_spans(labels, confidence, offsets, mt)
    marked = {i for s in spans for i in range(s["start"], s["end"])}
    visible = {i for i, character in enumerate(mt) if not character.isspace()}
    pairs = list(zip(labels.tolist(), offsets.tolist(), strict=True))
    tagged = {i for label, (start, end) in pairs if label for i in range(start, end)} & visible
    covered = {i for _, (start, end) in pairs for i in range(start, end)} & visible
    assert tagged <= marked
    assert marked & covered == tagged


@given(tagged_texts())
def test_severity_is_that_of_the_first_subword(case):
    labels, confidence, offsets, mt = case
    names = ["O", "MINOR", "MAJOR", "CRITICAL"]
    firsts = {names[labels[first]] for first, _ in label_runs(labels)}
    assert {s["severity"] for s in exact_spans(labels, confidence, offsets, mt)} <= firsts


MT = "The cat sat"
OFFSETS = np.array([(0, 0), (0, 3), (3, 7), (7, 11), (0, 0)])  # the space before a word included


def spans_of(labels: list[int]) -> list[tuple]:
    confidence = np.linspace(0.5, 0.9, len(labels), dtype=np.float32)
    return [
        (s["start"], s["end"], s["severity"], s["text"], round(s["confidence"], 3))
        for s in exact_spans(np.array(labels), confidence, OFFSETS, MT)
    ]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 0, 2, 0, 0], [(4, 7, "MAJOR", "cat", 0.7)]),  # no leading space
        ([0, 1, 3, 0, 0], [(0, 7, "MINOR", "The cat", 0.65)]),  # severity of the first
        ([0, 1, 0, 3, 0], [(0, 3, "MINOR", "The", 0.6), (8, 11, "CRITICAL", "sat", 0.8)]),
        ([0, 0, 0, 2, 2], [(8, 11, "MAJOR", "sat", 0.85)]),  # open at the end, </s> tagged
        ([3, 0, 0, 0, 3], []),  # only <s> and </s>
        ([0, 0, 0, 0, 0], []),
    ],
)
def test_exact_spans(labels, expected):
    assert spans_of(labels) == expected


def test_upstream_loses_a_span_that_is_still_open():
    labels, confidence = np.array([1, 0, 2, 2, 3]), np.ones(5, np.float32)
    (span,) = upstream_spans(labels, confidence, OFFSETS)
    assert (span.start, span.end, span.severity) == (0, 0, "MINOR")  # only that of <s>


def test_runs_that_share_a_character_become_one():
    """Check one character in three subwords, of which the middle one is untagged."""
    offsets = np.array([(0, 0), (0, 1), (0, 1), (0, 1), (0, 0)])
    confidence = np.array([0, 0.4, 0.9, 0.6, 0], np.float32)
    (span,) = exact_spans(np.array([0, 2, 0, 3, 0]), confidence, offsets, "…")
    assert (span["start"], span["end"], span["severity"]) == (0, 1, "MAJOR")
    assert span["confidence"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("severities", "score"),
    [
        ([], 1.0),
        (["MINOR"], 0.96),
        (["MAJOR", "CRITICAL"], 0.4),
        (["CRITICAL"] * 3, 0.0),
        (["MINOR"] * 30, 0.0),
    ],
)
def test_mqm_score(severities, score):
    assert mqm_score(severities) == pytest.approx(score)
