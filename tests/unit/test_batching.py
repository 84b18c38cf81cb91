"""The queue: who is batched with whom, who waits, who is refused."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.backend import Encoded
from scorekit.server.batch import cut_batches, padded_tokens, run_batch
from scorekit.server.batching import Batcher, Wanted
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.job import Job
from scorekit.server.metrics import Metrics
from scorekit.server.settings import ServiceSettings

LENGTHS = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([1, 3])), max_size=200)


@given(LENGTHS, st.integers(1, 4000), st.one_of(st.none(), st.integers(1, 20)))
def test_batches_hold_every_sample_once_within_the_budget(lengths, max_tokens, max_items):
    batches = cut_batches(lengths, max_tokens, max_items)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i][0] for i in batch) * sum(lengths[i][1] for i in batch)
        assert padded <= max_tokens or len(batch) == 1
        assert max_items is None or len(batch) <= max_items


@given(LENGTHS.filter(len))
def test_a_batch_holds_neighbours_in_length(lengths):
    order = [lengths[i][0] for batch in cut_batches(lengths, 2000) for i in batch]
    assert order == sorted(order, reverse=True)


def _encode(backend, *mts):
    samples = [TranslationSample(src="s", mt=mt) for mt in mts]
    return samples, backend.encode(samples, MetricXOptions())


def test_a_poison_sample_fails_alone():
    backend = FakeBackend(poison="poison")
    samples, encoded = _encode(backend, *(f"mt {i}" for i in range(40)), "poison", "mt 41")
    outcomes = run_batch(backend.forward, encoded)
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.mt == "poison":
            assert isinstance(outcome, SampleError) and outcome.type == "model_failure"
        else:
            assert outcome["score"] == fake_score(sample, 25.0)


def test_a_score_that_is_not_finite_is_a_typed_failure():
    backend = FakeBackend()
    _, encoded = _encode(backend, "fine", "nan")
    good, bad = run_batch(backend.forward, encoded)
    assert math.isfinite(good["score"])
    assert bad.type == "non_finite"


def test_a_backend_that_answers_too_few_fails_its_samples():
    class Short(FakeBackend):
        def forward(self, batch):
            return super().forward(batch)[:-1]

    _, encoded = _encode(FakeBackend(), "a", "b")
    assert [o.type for o in run_batch(Short().forward, encoded)] == ["model_failure"] * 2


class Gate(FakeBackend):
    """Scores when told to, and remembers which texts came in one batch."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)
        self.texts = []

    def open(self, batches):
        for _ in range(batches):
            self.go.release()

    def forward(self, batch):
        self.go.acquire()
        self.texts.append([e.payload.mt for e in batch])
        return super().forward(batch)


class Caller:
    """What a test holds of one request: its job, and each text's flight."""

    def __init__(self, batcher, job, keys):
        self.job = job
        self.flights = [batcher._flights[key] for key in keys]

    async def answers(self):
        await self.job.done
        return [from_json(a) if isinstance(a, bytes) else a for a in self.job.answers]


def _run(test, backend=None, **limits):
    """Run `test(batcher, submit)` on an event loop with a started batcher."""
    backend = backend or FakeBackend()
    stored = []

    async def body():
        settings = ServiceSettings(**{"max_batch_tokens": 10_000, "max_queue_items": 1000} | limits)
        batcher = Batcher(backend, settings, Metrics(), stored.append)
        release = getattr(backend, "open", None)
        if release:
            release(3)
        batcher.warm_up(backend.load())
        backend.batches.clear()
        if release:
            backend.texts.clear()
        batcher.start()

        def submit(*mts, priority="interactive", cache=True):
            samples = [TranslationSample(src="s", mt=mt) for mt in mts]
            keys = [mt.encode() for mt in mts]
            wanted = [
                Wanted(i, k, s, 4) for i, (k, s) in enumerate(zip(keys, samples, strict=True))
            ]
            job = Job([None] * len(mts), time.monotonic())
            batcher.submit(job, wanted, MetricXOptions(cache=cache), priority)
            return Caller(batcher, job, keys)

        try:
            await test(batcher, submit)
        finally:
            if release:
                release(1000)
            batcher.stop()

    asyncio.run(asyncio.wait_for(body(), 20))
    return stored


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_requests_of_different_callers_share_a_batch():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first.flights[0].taken)
        others = [submit(f"caller {i}") for i in range(5)]
        await _until(lambda: all(o.flights[0].encoded for o in others))
        backend.open(2)
        for caller in (first, *others):
            await caller.job.done
        assert sorted(backend.texts[1]) == [f"caller {i}" for i in range(5)]

    _run(test, backend)


def test_equal_samples_in_flight_are_scored_once_and_answer_every_request():
    backend = FakeBackend(seconds_per_batch=0.01)

    async def test(batcher, submit):
        one, two = submit("a", "b", "a"), submit("b", "a")
        a, b, again = await one.answers()
        assert a == again != b
        assert await two.answers() == [b, a]

    _run(test, backend)
    assert sum(backend.batches) == 2


def test_interactive_goes_before_bulk_and_lifts_what_it_joins():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first.flights[0].taken)
        bulk = submit("bulk 1", "bulk 2", "wanted", priority="bulk")
        await _until(lambda: all(f.encoded for f in bulk.flights))
        now = submit("now", "wanted")
        last = submit("last")
        await _until(lambda: last.flights[0].encoded)  # and with it what was lifted before
        backend.open(3)
        for caller in (bulk, now, last):
            await caller.job.done
        assert sorted(backend.texts[1]) == ["last", "now", "wanted"]
        assert sorted(backend.texts[2]) == ["bulk 1", "bulk 2"]

    _run(test, backend)


def test_what_nobody_waits_for_is_not_scored_unless_another_waits_too():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first.flights[0].taken)
        leaver, stayer = submit("left", "shared"), submit("shared")
        await _until(lambda: all(f.encoded for f in leaver.flights))
        batcher.release(leaver.job)
        backend.open(2)
        await first.job.done
        (answer,) = await stayer.answers()
        assert "score" in answer
        assert leaver.job.answers == [None, None]
        assert backend.texts[1] == ["shared"]
        assert batcher.in_flight == 0

    _run(test, backend)


def test_a_full_queue_refuses_the_whole_request_and_keeps_nothing_of_it():
    backend = Gate()

    async def test(batcher, submit):
        submit(*(f"mt {i}" for i in range(8)))
        with pytest.raises(RequestError) as refused:
            submit("x", "y", "z")
        assert refused.value.type == "overloaded" and refused.value.retry_after >= 1
        assert batcher.in_flight == 8
        submit("mt 1", "mt 2", "x", "y")  # two of them are in flight already
        with pytest.raises(RequestError) as hopeless:
            submit(*(f"new {i}" for i in range(11)))
        assert hopeless.value.type == "too_large"

    _run(test, backend, max_queue_items=10)


def test_the_queue_is_bounded_by_tokens_too_and_gives_their_room_back():
    backend = Gate()  # each sample of these tests counts as 4 bytes: two tokens

    async def test(batcher, submit):
        first = submit("a", "b")
        with pytest.raises(RequestError) as refused:
            submit("c")
        assert refused.value.type == "overloaded"
        with pytest.raises(RequestError) as hopeless:
            submit("c", "d", "e")
        assert hopeless.value.type == "too_large"
        backend.open(2)
        await first.job.done
        batcher.release(submit("c", "d").job)
        assert batcher._room == 0
        backend.open(2)
        await submit("e", "f").job.done

    _run(test, backend, max_queue_tokens=4)


def test_only_good_results_are_handed_to_the_cache():
    async def test(batcher, submit):
        for caller in (submit("good", "nan"), submit("unwanted", cache=False)):
            await caller.job.done

    (stored,) = [results for results in _run(test) if results]
    assert list(stored) == [b"good"]
    assert from_json(stored[b"good"])["score"] == fake_score(
        TranslationSample(src="s", mt="good"), 25.0
    )


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
        assert batcher.in_flight == 0

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

        def die(self, where):
            if self.armed and where == broken:
                raise SystemExit("the driver is gone")

    backend = Deadly()

    async def test(batcher, submit):
        backend.armed = True
        waiting = submit("a")
        if broken == "forward":
            (answer,) = await waiting.answers()
            assert answer.type == "model_failure"
        else:  # it was in nobody's hands: another replica may be asked
            with pytest.raises(RequestError, match="the model thread ended"):
                await waiting.answers()
        await _until(lambda: batcher.dead)
        assert batcher.fault() == "the model thread ended"
        with pytest.raises(RequestError, match="the model thread ended"):
            submit("b")

    _run(test, backend)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), min_size=1, max_size=12),  # texts of a request
        st.sampled_from(["interactive", "bulk"]),
        st.sampled_from(["stays", "leaves at once", "leaves later"]),
        st.sampled_from([0.0, 0.0, 0.002]),  # pause before the next one
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.sampled_from([0.0, 0.001]), st.sampled_from([0.0, 10.0]))
def test_every_waiter_gets_exactly_one_answer_its_own(requests, batch_s, patience_s):
    """Texts repeat, 7 kills its batch, 11 has no finite score, callers come and go."""
    backend = FakeBackend(seconds_per_batch=batch_s, poison="7")
    answered = []

    def mt_of(text):
        return f"{text} " * (text + 1) + ("nan" if text == 11 else "")

    async def test(batcher, submit):
        staying = []
        for texts, priority, leaves, pause in requests:
            caller = submit(*map(mt_of, texts), priority=priority)
            caller.job.on_answer = lambda index, job=caller.job: answered.append((id(job), index))
            if leaves == "leaves at once":
                batcher.release(caller.job)
            elif leaves == "leaves later":
                asyncio.get_running_loop().call_later(0.003, batcher.release, caller.job)
            else:
                staying.append((texts, caller))
            if pause:
                await asyncio.sleep(pause)
        for texts, caller in staying:
            for text, answer in zip(texts, await caller.answers(), strict=True):
                mt = mt_of(text)
                if "7" in mt:
                    assert answer.type == "model_failure"
                elif "nan" in mt:
                    assert answer.type == "non_finite"
                else:
                    assert answer["score"] == fake_score(TranslationSample(src="s", mt=mt), 25.0)
        assert len(answered) == len(set(answered))
        await _until(lambda: batcher.in_flight == 0)
        assert batcher._room == 0

    _run(test, backend, max_batch_tokens=40, bulk_patience_s=patience_s)


def test_encoded_is_small():
    assert not hasattr(Encoded(1, {}, None), "__dict__")


def test_given_up_samples_are_neither_tokenised_nor_kept():
    tokenised = []

    class Counting(Gate):
        def encode(self, samples, options):
            tokenised.extend(s.mt for s in samples)
            time.sleep(0.01)
            return super().encode(samples, options)

    backend = Counting()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first.flights[0].taken)
        for i in range(200):
            batcher.release(submit(*(f"{i} {k}" for k in range(40))).job)
        last = submit("stays")
        await _until(lambda: last.flights[0].encoded)
        assert batcher.in_flight == 2
        assert len(batcher._lanes) < 3000
        backend.open(2)
        await last.job.done

    _run(test, backend)
    assert len(tokenised) < 500  # of 8,000


def test_nobody_hangs_when_the_log_cannot_be_written(monkeypatch):
    class Full:
        def error(self, *args, **kwargs):
            raise OSError("no space left on device")

        critical = error

    async def test(batcher, submit):
        monkeypatch.setattr("scorekit.server.batch.log", Full())
        monkeypatch.setattr("scorekit.server.batching.log", Full())
        (answer,) = await submit("poison").answers()
        assert answer.type == "model_failure"
        await _until(lambda: batcher.dead)
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
            held = Activations()
            seen.append(weakref.ref(held))
            if len(batch) > 1:
                raise MemoryError
            return super().forward(batch)

    seen = []
    backend = Hungry()
    _, encoded = _encode(backend, *"abcdefgh")
    assert all("score" in o for o in run_batch(backend.forward, encoded))
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
        batcher._lanes.max_tokens = 2000  # what warm-up would have refused
        for name in "ab":
            answers = await submit(*(f"{name} {i} " * 15 for i in range(60))).answers()
            assert all("score" in answer for answer in answers)
        assert batcher._lanes.max_tokens <= 600

    _run(test, backend, max_batch_tokens=512)


def test_a_batch_that_can_never_fit_is_told_before_any_work_is_taken():
    async def never(batcher, submit):
        raise AssertionError("it started")

    with pytest.raises(UserError, match=r"--max-batch-tokens 2000: a batch of .* does not fit"):
        _run(never, Small(), max_batch_tokens=2000)


def test_a_model_without_a_finite_score_for_a_plain_text_takes_no_work():
    class Broken(FakeBackend):
        def _outcome(self, sample):
            return {"score": math.nan}

    async def never(batcher, submit):
        raise AssertionError("it started")

    with pytest.raises(UserError, match=r"does not score a plain text \(non_finite: "):
        _run(never, Broken())


def test_a_lost_device_ends_the_thread_and_every_waiter_is_told():
    class Lost(FakeBackend):
        def forward(self, batch):
            if any("last" in e.payload.mt for e in batch):
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().forward(batch)

    async def test(batcher, submit):
        answers = await submit("last", "b").answers()
        assert [a.type for a in answers] == ["model_failure"] * 2
        await _until(lambda: batcher.dead)

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
        await _until(lambda: suspect.flights[0].taken)
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
        armed = lost = False

        def forward(self, batch):
            if self.lost:
                raise RuntimeError("CUDA error: device-side assert triggered")
            if self.armed:
                raise RuntimeError("no answer")
            return super().forward(batch)

    backend = Sick()

    async def test(batcher, submit):
        backend.armed = True
        await submit("a").answers()
        await _until(lambda: batcher.fault() == "the model fails")
        backend.lost = True
        await _until(lambda: batcher.dead)
        with pytest.raises(RequestError, match="the model thread ended"):
            submit("b")

    _run(test, backend)


def test_a_tokeniser_that_hangs_is_not_ready_and_takes_no_more(monkeypatch):
    monkeypatch.setattr("scorekit.server.batching.TOKENISE_STALL_S", 0.05)
    go = threading.Event()

    class Stuck(FakeBackend):
        def encode(self, samples, options):
            if samples[0].mt == "hangs":
                go.wait(20)
            return super().encode(samples, options)

    async def test(batcher, submit):
        stuck = submit("hangs")
        await _until(lambda: batcher.fault() == "the tokeniser hangs")
        with pytest.raises(RequestError, match="the tokeniser hangs"):
            submit("b")
        go.set()
        await stuck.job.done
        assert batcher.fault() is None

    _run(test, Stuck())


def test_bulk_is_tokenised_however_much_interactive_work_there_is():
    class Slow(FakeBackend):
        def encode(self, samples, options):
            time.sleep(0.002)
            return super().encode(samples, options)

    async def test(batcher, submit):
        bulk = submit("bulk", priority="bulk")
        others = []
        while not bulk.job.done.done():  # never fewer than ten pieces wait
            others = [o for o in others if not o.job.done.done()]
            others += [submit(f"{time.monotonic_ns()}") for _ in range(20 - len(others))]
            await asyncio.sleep(0)

    _run(test, Slow(), bulk_patience_s=0.02)


def test_a_lifted_sample_is_scored_once():
    backend = Gate()
    go = threading.Event()

    class Slow(Gate):
        def encode(self, samples, options):
            if samples[0].mt == "bulk":
                go.wait(20)
            return super().encode(samples, options)

    backend = Slow()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first.flights[0].taken)
        bulk = submit("bulk", "wanted", priority="bulk")
        now = submit("wanted")  # while the tokeniser has it
        go.set()
        last = submit("last")
        await _until(lambda: last.flights[0].encoded)
        also = submit("later", priority="bulk")
        wanted = submit("later")  # perhaps before the tokeniser has it
        await _until(lambda: also.flights[0].encoded)
        after = submit("after", priority="bulk")
        await _until(lambda: after.flights[0].encoded)
        backend.open(4)
        for caller in (bulk, now, last, also, wanted, after):
            await caller.job.done

    _run(test, backend)
    texts = [text for batch in backend.texts for text in batch]
    assert sorted(texts) == sorted(set(texts))


def test_the_threads_end_after_the_batch_in_hand():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("in hand")
        await _until(lambda: first.flights[0].taken)
        rest = submit("waits")
        await _until(lambda: rest.flights[0].encoded)
        batcher.stop()
        backend.open(2)
        await _until(lambda: not any(thread.is_alive() for thread in batcher._threads))

    _run(test, backend)
    assert backend.texts == [["in hand"]]


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
        assert batcher.fault() is None  # the text was at fault
        backend.sick = True
        await submit("a").answers()
        await _until(lambda: batcher.fault() == "the model fails")
        backend.sick = False
        await _until(lambda: batcher.fault() is None)  # asked without a request

    _run(test, backend)


def test_a_model_that_hangs_is_not_ready_and_takes_no_more():
    backend = Gate()

    async def test(batcher, submit):
        stuck = submit("hangs")
        await _until(lambda: batcher.fault() == "the model hangs in a batch")
        with pytest.raises(RequestError, match="hangs"):
            submit("b")
        backend.open(1)
        await stuck.job.done
        await _until(lambda: batcher.fault() is None)

    _run(test, backend, stall_after=0.05)


def test_a_panic_of_the_tokenizer_fails_its_text_and_not_the_process():
    class PanicException(BaseException):  # pyo3's is no Exception
        pass

    class Panicking(FakeBackend):
        def encode(self, samples, options):
            if any(s.mt == "panic" for s in samples):
                raise PanicException("rust")
            return super().encode(samples, options)

    async def test(batcher, submit):
        good, bad = await submit("a", "panic").answers()
        assert "score" in good and bad.type == "model_failure"
        assert batcher.fault() is None

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
