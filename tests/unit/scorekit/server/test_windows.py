"""Check `overlong: windows` with a fake backend whose tokens are words."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample, XCometOptions
from scorekit.server.backend import Encoded
from scorekit.server.batches import padded_tokens
from scorekit.server.fake import FakeBackend
from scorekit.server.local import score_encoded
from scorekit.server.windows import encode_in_windows

SENTENCES = st.sampled_from(
    ["The rice is red.", "집은 빨간색이다.", "Why?", "one two three four five", "\n", "네."]
)
TEXTS = st.lists(SENTENCES, max_size=30).map(" ".join)


def _score(samples, limit=16, backend=None, budget=64, **options):
    backend = backend or FakeBackend("xcomet")
    options = XCometOptions(max_input_length=limit, **options)
    if options.overlong == "windows":
        encoded = encode_in_windows(backend, samples, options)
    else:
        encoded = backend.encode(samples, options)
    good = [result for result in encoded if isinstance(result, Encoded)]
    scored = iter(score_encoded(backend, good, budget))
    return [result if isinstance(result, SampleError) else next(scored) for result in encoded]


def _sample(src, mt, ref=None):
    return TranslationSample(src=src, mt=mt, ref=ref)


LONG = _sample("The house is red. It is old. " * 9, "집은 red 빨간색이다. 오래 되었다. " * 9)


@settings(deadline=None)
@given(TEXTS, TEXTS, st.one_of(st.none(), TEXTS))
def test_every_character_is_in_one_window_and_spans_stand_in_their_place(src, mt, ref):
    sample = _sample(src, mt, ref)
    (outcome,) = _score([sample], overlong="windows")
    for span in outcome["error_spans"]:
        assert mt[span["start"] : span["end"]] == span["text"]
    if "windows" not in outcome:
        assert (outcome,) == tuple(_score([sample]))
        return
    windows = outcome["windows"]
    for side, text in (("src", src), ("mt", mt)):
        assert windows[0][f"{side}_start"] == 0 and windows[-1][f"{side}_end"] == len(text)
        assert all(a[f"{side}_end"] == b[f"{side}_start"] for a, b in pairwise(windows))
    assert not any(outcome["truncated"].values()) and outcome["mt_covered"] == len(mt)
    weights = [
        (w["src_end"] - w["src_start"]) / (len(src) or 1)
        + (w["mt_end"] - w["mt_start"]) / (len(mt) or 1)
        for w in windows
    ]
    mean = math.fsum(w["score"] * k for w, k in zip(windows, weights, strict=True)) / sum(weights)
    assert math.isclose(outcome["score"], mean)


def test_windows_are_about_equal_and_end_where_sentences_end():
    (outcome,) = _score([LONG], overlong="windows")
    assert len(outcome["windows"]) > 3
    for window in outcome["windows"]:
        src = LONG.src[window["src_start"] : window["src_end"]].strip()
        mt = LONG.mt[window["mt_start"] : window["mt_end"]].strip()
        assert 10 <= len((src + " " + mt).split()) + 1 <= 16
        assert src.endswith(".") and mt.endswith(".")
    assert [span["text"] for span in outcome["error_spans"]] == ["red"] * 9


def test_what_fits_has_the_same_number_whatever_overlong_is():
    short = _sample("The house is red.", "집은 red 빨간색이다.")
    answers = [_score([short], overlong=over)[0] for over in ("truncate", "error", "windows")]
    assert answers[0] == answers[1] == answers[2]
    assert "windows" not in answers[2]


def test_windows_of_a_document_are_scored_in_batches_of_the_budget():
    backend = FakeBackend("xcomet")
    sizes = []
    forward = backend.forward
    backend.forward = lambda batch: sizes.append(padded_tokens(batch)) or forward(batch)
    many = [LONG, _sample("a", "b"), LONG]
    outcome = _score(many, backend=backend, budget=40, overlong="windows")
    assert max(sizes) <= 40 and len(sizes) > 5
    assert outcome[0] == outcome[2] and [outcome[1]] == _score([many[1]])


def test_the_queue_knows_what_a_sample_in_windows_costs():
    options = XCometOptions(max_input_length=16, overlong="windows")
    (encoded,) = encode_in_windows(FakeBackend("xcomet"), [LONG], options)
    assert encoded.length <= 16 and encoded.rows > 3
    assert padded_tokens([encoded]) >= encoded.fields["tokens"]


def test_a_batch_that_does_not_fit_the_memory_is_halved():
    backend = FakeBackend("xcomet")
    forward = backend.forward

    def small(batch):
        if len(batch) > 2:
            raise MemoryError("CUDA out of memory")
        return forward(batch)

    backend.forward = small
    (outcome,) = _score([LONG], backend=backend, budget=1000, overlong="windows")
    assert [outcome] == _score([LONG], overlong="windows")


def test_a_window_that_fails_fails_its_sample_alone():
    bad = LONG.model_copy(update={"mt": LONG.mt + " nan"})
    outcome = _score([LONG, bad], overlong="windows")
    assert outcome[0] == _score([LONG], overlong="windows")[0]
    assert isinstance(outcome[1], SampleError) and outcome[1].type == "non_finite"
    poisoned = LONG.model_copy(update={"mt": LONG.mt + " poison"})
    outcome = _score(
        [LONG, poisoned], backend=FakeBackend("xcomet", poison="poison"), overlong="windows"
    )
    assert isinstance(outcome[0], dict)
    assert isinstance(outcome[1], SampleError) and outcome[1].type == "model_failure"


def test_a_window_that_the_model_refuses_fails_its_sample():
    backend = FakeBackend("xcomet")
    encode = backend.encode

    def refusing(samples, options):
        results = encode(samples, options)
        return [
            SampleError("invalid_input", "no reference")
            if isinstance(result, Encoded) and "red" in sample.mt
            else result
            for sample, result in zip(samples, results, strict=True)
        ]

    backend.encode = refusing
    (outcome,) = _score([LONG], backend=backend, overlong="windows")
    assert isinstance(outcome, SampleError) and outcome.type == "invalid_input"
    assert outcome.message.startswith("window src[0:") and outcome.message.endswith("no reference")


class Referenced(FakeBackend):
    """A backend that refuses samples without a reference."""

    def encode(self, samples, options):
        return [
            SampleError("invalid_input", "no reference") if sample.ref is None else result
            for sample, result in zip(samples, super().encode(samples, options), strict=True)
        ]


def test_a_sentence_that_the_reference_leaves_out_goes_with_its_neighbours():
    """Check a model that requires a reference: each window has a part of it."""
    ref = "빨갛다. " * 9
    (outcome,) = _score(
        [LONG.model_copy(update={"ref": ref})], backend=Referenced("xcomet"), overlong="windows"
    )
    assert isinstance(outcome, dict) and len(outcome["windows"]) > 3


def test_a_window_without_a_reference_fails_where_the_model_requires_one():
    src, mt = ("The house is red. " + "It is old and small. " * 30), "집은 red 빨갛다. 네. " * 20
    (outcome,) = _score(
        [_sample(src, mt, "빨갛다.")], backend=Referenced("xcomet"), overlong="windows"
    )
    assert isinstance(outcome, SampleError) and outcome.type == "invalid_input"
    assert outcome.message.endswith("no reference")


def test_errors_on_both_sides_of_a_border_stand_where_they_stand_in_the_whole():
    """Check spans in white space and line ends too, which no window passes to the model."""
    for space in (" ", "  ", "\r\n", "\n\n\t", "\u3000"):
        lines = "The house is big.", "Red 집은 크다 red."
        sample = _sample(*(space.join([space, *[line] * 9, space]) for line in lines))
        (unsplit,) = _score([sample], limit=500)
        (outcome,) = _score([sample], overlong="windows")
        borders = [window["mt_start"] for window in outcome["windows"][1:]]
        edges = {edge for s in outcome["error_spans"] for edge in (s["start"], s["end"])}
        assert borders and edges >= set(borders)
        assert outcome["error_spans"] == unsplit["error_spans"]


def test_omissions_stand_in_their_place_of_the_source():
    class Leaving(FakeBackend):
        """A backend that reports every `red` of the source as an omission."""

        def forward(self, batch):
            outcomes = super().forward(batch)
            for encoded, outcome in zip(batch, outcomes, strict=True):
                spans = re.finditer("red", encoded.payload.src)
                outcome["omissions"] = [{"start": m.start(), "end": m.end()} for m in spans]
            return outcomes

    sample = _sample("  The house is red.  " * 9, LONG.mt)
    (scored_sample,) = _score([sample], backend=Leaving("xcomet"), overlong="windows")
    omission_spans = [(span["start"], span["end"]) for span in scored_sample["omissions"]]
    assert omission_spans == [m.span() for m in re.finditer("red", sample.src)]


def test_what_cannot_be_cut_is_flagged():
    class Characters(FakeBackend):
        """A backend with ten tokens per character."""

        def encode(self, samples, options):
            encoded = []
            for sample in samples:
                size = 10 * (len(sample.src) + len(sample.mt))
                if size > 16 and options.overlong == "error":
                    encoded.append(SampleError("overlong", f"{size}"))
                    continue
                cut = {"src": False, "mt": size > 16, "ref": False}
                covered = 0 if size > 16 else len(sample.mt)
                fields = {"tokens": min(16, size), "truncated": cut, "mt_covered": covered}
                encoded.append(Encoded(min(16, size), fields, sample))
            return encoded

    options = XCometOptions(max_input_length=16, overlong="windows")
    (result,) = encode_in_windows(Characters("xcomet"), [_sample("ab", "cd")], options)
    assert result.fields["truncated"] == {"src": False, "mt": True, "ref": False}
    assert result.fields["mt_covered"] == 0


def test_windows_have_no_upstream_offsets():
    with pytest.raises(ValidationError, match="span_offsets must be exact"):
        XCometOptions(overlong="windows", span_offsets="upstream")


def test_a_score_of_windows_that_were_cut_in_another_way_is_not_taken_from_the_cache(monkeypatch):
    backend = FakeBackend("xcomet")
    description = backend.load()

    def key(revision, overlong):
        monkeypatch.setattr("scorekit.server.score_endpoint.REVISION", revision)
        body = {"samples": [{"src": "a", "mt": "b"}], "options": {"overlong": overlong}}
        return backend.endpoint.parse_request(
            backend.endpoint.request_type(1).model_validate(body), description
        ).key

    assert key(1, "windows") != key(2, "windows")
    assert key(1, "truncate") == key(2, "truncate")
