"""Check exact spans with the labels that unbabel-comet gives each position (files of `comet/`).

An odd span starts the text, runs to its end, starts with white space, or has a tagged `<s>` or
`</s>`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scorekit.schemas import Scored, TranslationSample, XCometOptions
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import QE, REF, in_float64, loaded, score
from tests.kits.comet import golden as comet_golden
from tests.kits.float64 import float64

#: Of a score in float32: its epsilon is 1.2e-7, and four layers and two heads of random weights
#: amplify it by less than a hundred; 1.7e-6 was the most where MKL sums in its oldest way.
FLOAT32 = 1e-4
CLOSE = 1e-6
#: (label, offset) of every position of a translation.
Tagged = list[tuple[int, tuple[int, int]]]


@dataclass
class Case:
    """Holds upstream's results.

    results: ours for QE, in float64.
    spans: the raw spans for each row of QE.
    tagged: labels of every fourth of `qe` and of `ref`."""

    folder: Path
    backend: XCometBackend
    results: list[Scored]
    scores: list[float]
    spans: list[list[Any]]
    tagged: dict[str, list[Tagged]]


@pytest.fixture(scope="module", autouse=True)
def exact_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with float64():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=comet_golden.XCOMET)
def case(request, comet_folder) -> Case:
    folder = comet_folder(request.param)
    golden, backend = comet_golden.read(request.param), in_float64(folder)
    rows = comet_golden.rows(request.param)
    indices = [k for k, row in enumerate(rows) if row in QE][: len(QE)]
    assert [rows[k] for k in indices] == QE
    tagged = {
        name: [
            list(zip(map(int, labels), offsets, strict=True))
            for labels, offsets in zip(
                golden["labels"][name], offsets_of(backend, tagged_rows), strict=True
            )
        ]
        for name, tagged_rows in (("qe", QE), ("ref", REF[::4]))
    }
    spans = [golden["spans"][k] for k in indices]
    return Case(folder, backend, score(backend, QE, [12]), golden["scores"], spans, tagged)


def offsets_of(backend: XCometBackend, rows: list[dict[str, str]]) -> list[list[Any]]:
    """Return the offsets of every position, including <s> and </s>.

    `test_comet_golden.py` compares them with upstream."""
    encoded = backend.encode([TranslationSample(**row) for row in rows], XCometOptions())
    return [[tuple(pair) for pair in sample.payload.offsets.tolist()] for sample in encoded]


def as_severities(result: Any) -> list[tuple]:
    return [(s.start, s.end, s.severity) for s in result.error_spans]


def test_the_odd_situations_occur(case):
    """Check that these cases occur: without them the other tests would prove little."""
    severities = Counter(span[2] for spans in case.spans for span in spans)
    assert all(severities[s] > 50 for s in ("minor", "major", "critical")), severities
    seen: Counter[str] = Counter()
    for pair, tagged in zip(QE, case.tagged["qe"], strict=True):
        mt, labels, offsets = pair["mt"], [t[0] for t in tagged], [t[1] for t in tagged]
        seen["<s> tagged"] += labels[0] != 0
        seen["</s> tagged"] += labels[-1] != 0
        seen["opens the text"] += labels[1] != 0
        seen["to the end, </s> tagged too: lost upstream"] += labels[-2] != 0 and labels[-1] != 0
        seen["to the end"] += labels[-2] != 0 and labels[-1] == 0
        seen["starts with white space"] += any(
            now and not before and mt[start:end][:1].isspace()
            for before, now, (start, end) in zip(labels, labels[1:], offsets[1:], strict=False)
        )
    assert len(seen) == 6 and all(n >= 3 for n in seen.values()), seen
    assert min(case.scores) < 0 and max(case.scores) > 0.9


def test_float32_is_near(case):
    """Check float32 as served: a label may flip if two are equally likely, and little else
    changes."""
    pairs = list(zip(score(loaded(case.folder), QE, [12]), case.results, strict=True))
    same = [p for p in pairs if as_severities(p[0]) == as_severities(p[1])]
    assert len(same) >= 0.97 * len(pairs)
    assert max(abs(result.score - exact_result.score) for result, exact_result in same) < FLOAT32


@pytest.mark.parametrize("name", ["qe", "ref"])
def test_exact_spans(case, name):
    """Check that texts match, have no outer white space, are in order, and lose nothing tagged."""
    rows = QE if name == "qe" else REF[::4]
    results = case.results if name == "qe" else score(case.backend, rows, [12])
    for row, tagged, result in zip(rows, case.tagged[name], results, strict=True):
        mt, end_before = row["mt"], 0
        for span in result.error_spans:
            assert mt[span.start : span.end] == span.text
            assert span.text and span.text == span.text.strip()
            assert span.start >= end_before
            end_before = span.end
        marked = {i for span in result.error_spans for i in range(span.start, span.end)}
        visible = {i for i, character in enumerate(mt) if not character.isspace()}
        should_be = {i for label, offset in tagged if label for i in range(*offset)} & visible
        assert should_be <= marked
        # Nothing else is marked, only characters that the tokenizer left out (a space
        # between two tagged words, a character without width).
        covered = {i for _, offset in tagged for i in range(*offset)} & visible
        assert marked & covered == should_be


def test_exact_spans_keep_severity_and_confidence(case):
    """Check that a visible span of upstream is kept; only its offsets are repaired."""
    for row, raw, result in zip(QE, case.spans, case.results, strict=True):
        mended = [
            (severity.upper(), pytest.approx(confidence, abs=CLOSE))
            for start, end, severity, _, confidence in raw
            if row["mt"][start:end].strip()
        ]
        kinds = [(s.severity, s.confidence) for s in result.error_spans]
        assert kinds[: len(mended)] == mended
        assert len(kinds) - len(mended) <= 1  # the span at the end, which upstream drops


def test_no_exact_span_of_an_odd_text_is_wrong(case):
    rows = [row for row in comet_golden.rows("xcomet_mix") if row["src"] in ("", "ich")]
    for row, result in zip(rows, score(case.backend, rows), strict=True):
        for span in result.error_spans:
            assert row["mt"][span.start : span.end] == span.text == span.text.strip() != ""
