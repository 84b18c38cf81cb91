"""Check the context of a window and which window's spans are used."""

from __future__ import annotations

import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.errors import SampleError
from scorekit.schemas import MetricXOptions, TranslationSample, XCometOptions
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.backend import Encoded
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.local import LocalScorer, score_encoded
from scorekit.server.windows import encode_in_windows
from tests.kits.examples import examples


class Seeing(FakeBackend):
    """A backend that records the samples that it scores, in order."""

    def __init__(self, service="xcomet"):
        super().__init__(service)
        self.seen = []

    def forward(self, batch):
        self.seen += [encoded.payload for encoded in batch]
        return super().forward(batch)


def _sample(src, mt, ref=None):
    return TranslationSample(src=src, mt=mt, ref=ref)


def _score(sample, limit, backend=None, budget=64):
    backend = backend or Seeing()
    options = XCometOptions(max_input_length=limit, overlong="windows")
    (encoded,) = encode_in_windows(backend, [sample], options)
    (outcome,) = score_encoded(backend, [encoded], budget)
    return {**encoded.fields, **outcome, "length": encoded.length}


def _numbered(count):
    """Return a sample whose sentences contain their numbers."""
    return _sample(
        " ".join(f"Sentence {k} here." for k in range(count)),
        " ".join(f"Red 문장 {k}." for k in range(count)),
    )


def _numbers(text):
    return [int(match) for match in re.findall(r"\d+", text)]


@settings(max_examples=examples(15))
@given(st.integers(6, 60), st.integers(16, 70))
def test_a_window_is_read_with_its_neighbours_which_others_answer_for(count, limit):
    """Check windows: a sentence and its translation are six words, each window adds one."""
    sample, backend = _numbered(count), Seeing()
    outcome = _score(sample, limit=limit, backend=backend)
    fits = (limit - 1) // 6
    if count <= fits:
        assert "windows" not in outcome
        return
    windows = sorted(outcome["windows"], key=lambda window: window["src_start"])
    assert len(windows) == math.ceil(count / fits)
    by_start = sorted(
        backend.seen,
        key=lambda shown_sample: (_numbers(shown_sample.src)[0], len(shown_sample.src)),
    )
    all_numbers = []
    for window, read in zip(windows, by_start, strict=True):
        own_numbers = _numbers(sample.src[window["src_start"] : window["src_end"]])
        assert own_numbers == _numbers(sample.mt[window["mt_start"] : window["mt_end"]])
        seen = _numbers(read.src)
        assert seen == _numbers(read.mt) == list(range(seen[0], seen[0] + fits))
        assert set(own_numbers) <= set(seen)
        before, behind = own_numbers[0] - seen[0], seen[-1] - own_numbers[-1]
        assert abs(before - behind) <= 1 or seen[0] == 0 or seen[-1] == count - 1
        assert window["score"] == fake_score(read, 1.0)
        all_numbers += own_numbers
    assert all_numbers == list(range(count))
    assert outcome["error_spans"] == _score(sample, limit=500)["error_spans"]
    assert outcome["tokens"] == len(windows) * (6 * fits + 1)


def test_a_span_that_goes_on_across_a_border_is_one_with_the_severity_of_its_beginning():
    class All(Seeing):
        """Marks all that it reads, the more surely the further in front it stands."""

        def _outcome(self, sample):
            first = _numbers(sample.mt)[0]
            span = {"start": 0, "end": len(sample.mt), "text": sample.mt}
            span |= {"severity": "minor" if first else "major", "confidence": 1 - first / 100}
            return {"score": 0.5, "error_spans": [span]}

    sample = _sample(*(f"  {text}\n" for text in (_numbered(30).src, _numbered(30).mt)))
    backend = All()
    outcome = _score(sample, limit=74, backend=backend)
    (span,) = outcome["error_spans"]
    assert sample.mt[span["start"] : span["end"]] == span["text"] == sample.mt.strip()
    assert span["severity"] == "major"
    sizes = [window["mt_end"] - window["mt_start"] for window in outcome["windows"]]
    sure = [1 - _numbers(shown_sample.mt)[0] / 100 for shown_sample in backend.seen]
    sizes[0], sizes[-1] = sizes[0] - 2, sizes[-1] - 1  # white space in front and at the end
    mean = sum(a * b for a, b in zip(sizes, sure, strict=True)) / sum(sizes)
    assert len(sizes) == 3 and math.isclose(span["confidence"], mean)


def test_a_span_that_only_one_window_sees_across_its_border_ends_at_the_last_word():
    class First(Seeing):
        """Marks all that it reads at the beginning of the text, nothing elsewhere."""

        def _outcome(self, sample):
            end = len(sample.mt) if _numbers(sample.mt)[0] == 0 else 0
            span = {"start": 0, "end": end, "severity": "minor", "confidence": None}
            return {"score": 0.5, "error_spans": [span | {"text": sample.mt}] if end else []}

    sample = _numbered(30)
    outcome = _score(sample, limit=74, backend=First())
    (span,) = outcome["error_spans"]
    end = outcome["windows"][0]["mt_end"]
    assert sample.mt[end - 1] == " "
    assert (span["start"], span["end"], span["text"]) == (0, end - 1, sample.mt[: end - 1])


def test_neighbours_never_push_a_window_over_the_limit():
    class Sticky(Seeing):
        """A sentence beside another costs a token more than alone."""

        def encode(self, samples, options):
            results = super().encode(samples, options)
            for k, sample in enumerate(samples):
                more = max(0, sample.src.count(".") - 1)
                if isinstance(results[k], Encoded):
                    size = results[k].length + more
                    results[k] = Encoded(size, {**results[k].fields, "tokens": size}, sample)
                    if size > options.max_input_length and options.overlong == "error":
                        results[k] = SampleError("overlong", str(size))
            return results

    for count, cores, num_reads in (
        (9, [4, 5], [5, 5]),  # six would fit by their sum, but are too many together
        (12, [3, 3, 3, 3], [4, 4, 4, 4]),  # windows of six are too many, too: they are split in two
    ):
        backend = Sticky()
        outcome = _score(_numbered(count), limit=40, backend=backend)
        assert outcome["length"] <= 40 and not any(outcome["truncated"].values())
        assert [len(_numbers(read.src)) for read in backend.seen] == num_reads
        sizes = [
            len(_numbers(_numbered(count).mt[w["mt_start"] : w["mt_end"]]))
            for w in outcome["windows"]
        ]
        assert sorted(sizes) == cores
        assert [span["text"] for span in outcome["error_spans"]] == ["Red"] * count


def test_spans_that_touch_within_a_window_stay_apart():
    class Halves(Seeing):
        """Marks a word in two spans."""

        def _outcome(self, sample):
            words = [(m.start(), m.end()) for m in re.finditer("Red", sample.mt)]
            cuts = [(a, a + 1) for a, _ in words] + [(a + 1, b) for a, b in words]
            fields = {"severity": "minor", "confidence": 0.5}
            spans = [
                {"start": a, "end": b, **fields, "text": sample.mt[a:b]} for a, b in sorted(cuts)
            ]
            return {"score": 0.5, "error_spans": spans}

    outcome = _score(_numbered(30), limit=74, backend=Halves())
    assert [span["text"] for span in outcome["error_spans"]] == ["R", "ed"] * 30


def test_texts_without_borders_are_read_in_work_that_grows_with_them():
    class Counting(Seeing):
        """A backend whose tokens are twenty characters. It counts the measured characters."""

        characters = 0

        def encode(self, samples, options):
            self.characters += sum(
                len(shown_sample.src) + len(shown_sample.mt) for shown_sample in samples
            )
            results = []
            for shown_sample in samples:
                size = (len(shown_sample.src) + len(shown_sample.mt)) // 20 + 1
                if size > options.max_input_length and options.overlong == "error":
                    results.append(SampleError("overlong", str(size)))
                    continue
                cut = dict.fromkeys(("src", "mt", "ref"), size > options.max_input_length)
                fields = {"tokens": size, "truncated": cut, "mt_covered": len(shown_sample.mt)}
                results.append(Encoded(size, fields, shown_sample))
            return results

    for src, mt in (
        ("a" * 100_000, "가" * 40_000),
        ("word " * 20_000, "낱말 " * 10_000),
        ("No. " * 10_000, "네. " * 10_000),
        ("No. " * 10_000, "가" * 3),
        ("\n" * 50_000, "네.\n" * 10_000),
    ):
        backend = Counting()
        outcome = _score(_sample(src, mt), 200, backend, 10_000)
        windows = outcome["windows"]
        assert windows[0]["mt_start"] == 0 and windows[-1]["mt_end"] == len(mt)
        assert windows[0]["src_start"] == 0 and windows[-1]["src_end"] == len(src)
        assert not any(outcome["truncated"].values())
        size = len(src) + len(mt)
        assert backend.characters < 20 * size
        assert (
            sum(len(shown_sample.src) + len(shown_sample.mt) for shown_sample in backend.seen)
            < 2 * size + 4000
        )


def test_in_process_and_a_reference():
    backend = Seeing("metricx")
    scorer = LocalScorer(backend)
    texts = SampleForScoring("One two. " * 300, "하나 둘. " * 300, "가나 다. " * 300)
    out = scorer.score_batch([texts], ScoringConfig(overlong="windows"))
    (result,) = out.metadata
    assert len(result.windows) > 2 and result.score == out.sequence_scores[0]
    for window, read in zip(result.windows, backend.seen, strict=True):
        num_sentences = texts.mt[window.mt_start : window.mt_end].count(".")
        count = read.mt.count(".")
        words = ("One two.", "하나 둘.", "가나 다.")
        assert count >= num_sentences and read == _sample(
            *(" ".join([word] * count) for word in words)
        )
        assert window.score == fake_score(read, 25.0)
    assert MetricXOptions().overlong == "truncate"
