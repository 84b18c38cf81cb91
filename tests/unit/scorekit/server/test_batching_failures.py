"""Check failures of texts, tokenizers, models, memory and devices in the batcher."""

from __future__ import annotations

import math
import threading

import pytest

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.batches import padded_tokens, run_batch
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.local import LocalScorer
from scorekit.server.windows import outcome_of_windows
from testing.servers import PATIENCE_S
from tests.kits.batching import Gate, _run, _until


def _encode(backend, *mts):
    samples = [TranslationSample(src="s", mt=mt) for mt in mts]
    return samples, backend.encode(samples, MetricXOptions())


def test_a_poison_sample_fails_alone():
    backend = FakeBackend(poison="poison")
    samples, encoded = _encode(backend, *(f"mt {i}" for i in range(40)), "poison", "mt 41")
    outcomes = run_batch(backend.forward, encoded, backend.endpoint.outcome_error)
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.mt == "poison":
            assert isinstance(outcome, SampleError) and outcome.type == "model_failure"
        else:
            assert outcome["score"] == fake_score(sample, 25.0)


def test_a_score_that_is_not_finite_is_a_typed_failure():
    backend = FakeBackend()
    _, encoded = _encode(backend, "fine", "nan")
    good, bad = run_batch(backend.forward, encoded, backend.endpoint.outcome_error)
    assert math.isfinite(good["score"])
    assert bad.type == "non_finite"


def test_a_backend_that_answers_too_few_fails_its_samples():
    class Short(FakeBackend):
        def forward(self, batch):
            return super().forward(batch)[:-1]

    backend = Short()
    _, encoded = _encode(backend, "a", "b")
    outcomes = run_batch(backend.forward, encoded, backend.endpoint.outcome_error)
    assert [o.type for o in outcomes] == ["model_failure"] * 2


def test_a_text_that_breaks_the_tokeniser_fails_alone_and_nobody_hangs():
    class Broken(FakeBackend):
        def encode(self, samples, options):
            if any(s.mt == "breaks it" for s in samples):
                raise RuntimeError("no")
            return super().encode(samples, options)

    async def test(batcher, submit):
        good, bad, fine = await submit("a", "breaks it", "b").answers()
        assert bad.type == "model_failure"
        assert "score" in good and "score" in fine
        assert len(batcher.flights) == 0

    _run(test, Broken())


@pytest.mark.parametrize("broken", ["encode", "forward"])
def test_a_dead_thread_fails_its_waiters_and_says_so(broken):
    class Deadly(FakeBackend):
        def load(self):
            self.armed = False
            return super().load()

        def encode(self, samples, options):
            return self.die("encode") or super().encode(samples, options)

        def forward(self, batch):
            return self.die("forward") or super().forward(batch)

        def die(self, thread_name):
            if self.armed and thread_name == broken:
                raise SystemExit("the driver is gone")

    backend = Deadly()

    async def test(batcher, submit):
        backend.armed = True
        waiting = submit("a")
        if broken == "forward":
            (answer,) = await waiting.answers()
            assert answer.type == "model_failure"
        else:  # nothing was processing it: another replica may be tried
            with pytest.raises(RequestError, match="the model thread ended"):
                await waiting.answers()
        await _until(lambda: batcher.is_dead)
        assert batcher.unhealthy_reason() == "the model thread ended"
        with pytest.raises(RequestError, match="the model thread ended"):
            submit("b")

    _run(test, backend)


def test_nobody_hangs_when_the_log_cannot_be_written(monkeypatch):
    class Full:
        def error(self, *args, **kwargs):
            raise OSError("no space left on device")

        critical = error

    async def test(batcher, submit):
        monkeypatch.setattr("scorekit.server.batches.log", Full())
        monkeypatch.setattr("scorekit.server.batcher.log", Full())
        (answer,) = await submit("poison").answers()
        assert answer.type == "model_failure"
        await _until(lambda: batcher.is_dead)
        with pytest.raises(RequestError):
            submit("b")

    _run(test, FakeBackend(poison="poison"))


def test_a_failed_batch_frees_its_memory_before_it_is_halved():
    import weakref

    class Activations:
        pass

    alive = []

    class Hungry(FakeBackend):
        def forward(self, batch):
            alive.append(sum(ref() is not None for ref in seen))
            activations = Activations()
            seen.append(weakref.ref(activations))
            if len(batch) > 1:
                raise MemoryError
            return super().forward(batch)

    seen = []
    backend = Hungry()
    _, encoded = _encode(backend, *"abcdefgh")
    outcomes = run_batch(backend.forward, encoded, backend.endpoint.outcome_error)
    assert all("score" in outcome for outcome in outcomes)
    assert set(alive) == {0}


class Small(FakeBackend):
    """A device whose memory holds 600 padded tokens."""

    def forward(self, batch):
        if padded_tokens(batch) > 600:
            raise MemoryError("CUDA out of memory")
        return super().forward(batch)


def test_a_batch_that_does_not_fit_is_split_and_later_ones_are_smaller():
    backend = Small()

    async def test(batcher, submit):
        batcher.model.max_tokens = 2000  # a limit above what warm-up allows
        for name in "ab":
            answers = await submit(*(f"{name} {i} " * 15 for i in range(60))).answers()
            assert all("score" in answer for answer in answers)
        assert batcher.model.max_tokens <= 600

    _run(test, backend, max_batch_tokens=512)


def test_a_batch_that_can_never_fit_is_told_before_any_work_is_taken():
    async def submit_unstarted(batcher, submit):
        raise AssertionError("it started")

    with pytest.raises(UserError, match=r"--max-batch-tokens 2000: a batch of .* does not fit"):
        _run(submit_unstarted, Small(), max_batch_tokens=2000)


def test_a_model_without_a_finite_score_for_a_plain_text_takes_no_work():
    class Broken(FakeBackend):
        def _outcome(self, sample):
            return {"score": math.nan}

    async def submit_unstarted(batcher, submit):
        raise AssertionError("it started")

    with pytest.raises(UserError, match=r"does not score a plain text \(non_finite: "):
        _run(submit_unstarted, Broken())


def test_a_lost_device_ends_the_thread_and_every_waiter_is_told():
    class Lost(FakeBackend):
        def forward(self, batch):
            if any("last" in e.payload.mt for e in batch):
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().forward(batch)

    async def test(batcher, submit):
        answers = await submit("last", "b").answers()
        assert [a.type for a in answers] == ["model_failure"] * 2
        await _until(lambda: batcher.is_dead)

    _run(test, Lost())


def test_who_had_no_part_in_the_batch_that_lost_the_device_is_refused_and_may_ask_elsewhere():
    class Lost(Gate):
        def forward(self, batch):
            outcomes = super().forward(batch)
            if any("last" in e.payload.mt for e in batch):
                raise RuntimeError("CUDA error: device-side assert triggered")
            return outcomes

    backend = Lost()

    async def test(batcher, submit):
        suspect = submit("last")
        await _until(suspect.is_in_the_model)
        other, both = submit("b", "c"), submit("d", "last")
        backend.open(1)
        assert [a.type for a in await suspect.answers()] == ["model_failure"]
        assert [a.type for a in await both.answers()] == ["model_failure"] * 2
        with pytest.raises(RequestError) as refused:
            await other.answers()
        assert refused.value.type == "unavailable" and refused.value.retry_after

    _run(test, backend)


def test_a_sick_model_whose_device_is_lost_takes_no_more():
    class Sick(FakeBackend):
        armed = is_device_lost = False

        def forward(self, batch):
            if self.is_device_lost:
                raise RuntimeError("CUDA error: device-side assert triggered")
            if self.armed:
                raise RuntimeError("no answer")
            return super().forward(batch)

    backend = Sick()

    async def test(batcher, submit):
        backend.armed = True
        await submit("a").answers()
        await _until(lambda: batcher.unhealthy_reason() == "the model fails")
        backend.is_device_lost = True
        await _until(lambda: batcher.is_dead)
        with pytest.raises(RequestError, match="the model thread ended"):
            submit("b")

    _run(test, backend)


def test_a_tokeniser_that_hangs_is_not_ready_and_takes_no_more(monkeypatch):
    monkeypatch.setattr("scorekit.server.batcher.TOKENISE_STALL_S", 0.05)
    go = threading.Event()

    class Stuck(FakeBackend):
        def encode(self, samples, options):
            if samples[0].mt == "hangs":
                go.wait(PATIENCE_S)
            return super().encode(samples, options)

    async def test(batcher, submit):
        stuck = submit("hangs")
        await _until(lambda: batcher.unhealthy_reason() == "the tokeniser hangs")
        with pytest.raises(RequestError, match="the tokeniser hangs"):
            submit("b")
        go.set()
        await stuck.job.done
        assert batcher.unhealthy_reason() is None

    _run(test, Stuck())


def test_a_model_that_fails_every_text_is_not_ready_until_it_answers_again():
    class Sick(FakeBackend):
        sick = False

        def forward(self, batch):
            if self.sick:
                raise RuntimeError("no answer")
            return super().forward(batch)

    backend = Sick(poison="poison")

    async def test(batcher, submit):
        await submit("poison").answers()
        assert batcher.unhealthy_reason() is None  # the text caused the error
        backend.sick = True
        await submit("a").answers()
        await _until(lambda: batcher.unhealthy_reason() == "the model fails")
        backend.sick = False
        await _until(lambda: batcher.unhealthy_reason() is None)  # checked without a request

    _run(test, backend)


def test_a_model_that_hangs_is_not_ready_and_takes_no_more():
    backend = Gate()

    async def test(batcher, submit):
        stuck = submit("hangs")
        await _until(lambda: batcher.unhealthy_reason() == "the model hangs in a batch")
        with pytest.raises(RequestError, match="hangs"):
            submit("b")
        backend.open(1)
        await stuck.job.done
        await _until(lambda: batcher.unhealthy_reason() is None)

    _run(test, backend, stall_after=0.05)


def test_a_panic_of_the_tokenizer_fails_its_text_and_not_the_process():
    class PanicException(BaseException):  # pyo3's PanicException is not an Exception
        pass

    class Panicking(FakeBackend):
        def encode(self, samples, options):
            if any(s.mt == "panic" for s in samples):
                raise PanicException("rust")
            return super().encode(samples, options)

    async def test(batcher, submit):
        good, bad = await submit("a", "panic").answers()
        assert "score" in good and bad.type == "model_failure"
        assert batcher.unhealthy_reason() is None

    _run(test, Panicking())


def test_a_number_that_is_not_finite_beside_the_score_is_a_typed_failure():
    class Odd(FakeBackend):
        def _outcome(self, sample):
            odd = float("nan") if sample.mt == "odd" else 0.5
            span = {"text": "NaN and Infinity", "confidence": odd}
            return {"score": 1.0, "error_spans": [span]}

    async def test(batcher, submit):
        odd, fine = await submit("odd", "fine").answers()
        assert odd.type == "non_finite"
        assert fine["error_spans"][0]["text"] == "NaN and Infinity"

    _run(test, Odd())


def test_windows_that_cannot_be_merged_fail_their_sample_and_nobody_hangs():
    class Spans(FakeBackend):
        def _outcome(self, sample):
            is_window = len(sample.mt) > 100
            return super()._outcome(sample) | ({"error_spans": [{"end": 1}]} if is_window else {})

    async def test(batcher, submit):
        long, short = await submit("x. " * 600, "short", overlong="windows").answers()
        assert long.type == "model_failure" and "merged" in str(long)
        assert "score" in short
        assert not batcher.flights and not batcher.tokens_in_use

    _run(test, Spans("xcomet"))
    samples = [{"src": "s", "mt": mt} for mt in ("x. " * 600, "short")]
    scored = LocalScorer(Spans("xcomet")).score_batch(samples, {"overlong": "windows"})
    assert [score is None for score in scored.sequence_scores] == [True, False]


def test_the_windows_of_a_text_are_merged_once(monkeypatch):
    merges = []

    def merge(encoded, outcomes):
        merges.append(len(outcomes))
        return outcome_of_windows(encoded, outcomes)

    monkeypatch.setattr("scorekit.server.batcher.outcome_of_windows", merge)

    async def test(batcher, submit):
        (answer,) = await submit("x. " * 600, overlong="windows", limit=16).answers()
        assert merges == [len(answer["windows"])]

    _run(test, max_batch_tokens=32)
