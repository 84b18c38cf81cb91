"""The queue: who is batched with whom, who waits, who is refused."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.backend import Encoded
from scorekit.server.batching import Batcher, cut_batches, run_batch
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.metrics import Metrics

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
    outcomes = run_batch(backend, encoded)
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.mt == "poison":
            assert isinstance(outcome, SampleError) and outcome.type == "model_failure"
        else:
            assert outcome["score"] == fake_score(sample, 25.0)


def test_a_score_that_is_not_finite_is_a_typed_failure():
    backend = FakeBackend()
    _, encoded = _encode(backend, "fine", "nan")
    good, bad = run_batch(backend, encoded)
    assert math.isfinite(good["score"])
    assert bad.type == "non_finite"


def test_a_backend_that_answers_too_few_fails_its_samples():
    class Short(FakeBackend):
        def forward(self, batch):
            return super().forward(batch)[:-1]

    _, encoded = _encode(FakeBackend(), "a", "b")
    assert [o.type for o in run_batch(Short(), encoded)] == ["model_failure"] * 2


class Gate(FakeBackend):
    """Scores when told to, and remembers which texts came in one batch."""

    def __init__(self):
        super().__init__()
        import threading

        self.go = threading.Semaphore(0)
        self.texts = []

    def forward(self, batch):
        self.go.acquire()
        self.texts.append([e.payload.mt for e in batch])
        return super().forward(batch)


def _run(test, backend=None, **limits):
    """Run `test(batcher, submit)` on an event loop with a started batcher."""
    backend = backend or FakeBackend()
    stored = []

    async def body():
        batcher = Batcher(
            backend,
            max_batch_tokens=limits.get("max_batch_tokens", 10_000),
            max_queue_items=limits.get("max_queue_items", 1000),
            metrics=Metrics(),
            on_scored=stored.append,
        )
        batcher.start("cpu")

        def submit(*mts, priority="interactive", cache=True):
            samples = [TranslationSample(src="s", mt=mt) for mt in mts]
            keys = [mt.encode() for mt in mts]
            return batcher.submit(keys, samples, MetricXOptions(cache=cache), priority)

        try:
            await test(batcher, submit)
        finally:
            for _ in range(1000):
                if isinstance(backend, Gate):
                    backend.go.release()
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
        await _until(lambda: first[0].started)
        others = [submit(f"caller {i}")[0] for i in range(5)]
        await _until(lambda: all(f.encoded for f in others))
        backend.go.release()
        backend.go.release()
        await asyncio.wait([f.future for f in first + others])
        assert sorted(backend.texts[1]) == [f"caller {i}" for i in range(5)]

    _run(test, backend)


def test_equal_samples_in_flight_are_scored_once():
    backend = FakeBackend(seconds_per_batch=0.01)

    async def test(batcher, submit):
        flights = submit("a", "b", "a") + submit("b", "a")
        assert len(set(flights)) == 2
        await asyncio.wait({f.future for f in flights})

    _run(test, backend)
    assert sum(backend.batches) == 2


def test_interactive_goes_before_bulk_and_lifts_what_it_joins():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first[0].started)
        bulk = submit("bulk 1", "bulk 2", "wanted", priority="bulk")
        await _until(lambda: all(f.encoded for f in bulk))
        now = submit("now", "wanted")
        await _until(lambda: all(f.encoded for f in now))
        for _ in range(3):
            backend.go.release()
        await asyncio.wait({f.future for f in bulk + now})
        assert sorted(backend.texts[1]) == ["now", "wanted"]
        assert sorted(backend.texts[2]) == ["bulk 1", "bulk 2"]

    _run(test, backend)


def test_what_nobody_waits_for_is_not_scored_unless_another_waits_too():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(lambda: first[0].started)
        leaver = submit("left", "shared")
        stayer = submit("shared")
        await _until(lambda: all(f.encoded for f in leaver))
        batcher.release(leaver)
        backend.go.release()
        backend.go.release()
        await asyncio.wait([f.future for f in first + stayer])
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


def test_only_good_results_are_handed_to_the_cache():
    async def test(batcher, submit):
        flights = submit("good", "nan") + submit("unwanted", cache=False)
        await asyncio.wait([f.future for f in flights])

    stored = _run(test)
    assert [key for results in stored for key in results] == [b"good"]


def test_a_tokeniser_that_raises_fails_its_samples_and_nobody_hangs():
    class Broken(FakeBackend):
        def encode(self, samples, options):
            raise RuntimeError("no")

    async def test(batcher, submit):
        (flight,) = submit("a")
        assert (await flight.future).type == "model_failure"
        assert batcher.in_flight == 0

    _run(test, Broken())


def test_a_dead_model_thread_fails_its_waiters_and_says_so():
    class Deadly(FakeBackend):
        def forward(self, batch):
            raise SystemExit("the driver is gone")

    async def test(batcher, submit):
        (flight,) = submit("a")
        assert (await flight.future).type == "model_failure"
        await _until(lambda: not batcher.alive())
        with pytest.raises(RequestError, match="the model thread ended"):
            submit("b")

    _run(test, Deadly())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 30), min_size=1, max_size=12),  # texts of a request
            st.sampled_from(["interactive", "bulk"]),
            st.booleans(),  # whether the caller leaves at once
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_waiter_gets_its_own_answer(requests):
    backend = FakeBackend(poison="7")

    async def test(batcher, submit):
        waiting = []
        for texts, priority, leaves in requests:
            flights = submit(*(f"{t} " * (t + 1) for t in texts), priority=priority)
            if leaves:
                batcher.release(flights)
            else:
                waiting += zip(texts, flights, strict=True)
            await asyncio.sleep(0)
        for text, flight in waiting:
            outcome = await flight.future
            mt = f"{text} " * (text + 1)
            if "7" in mt:
                assert outcome.type == "model_failure"
            else:
                assert outcome["score"] == fake_score(TranslationSample(src="s", mt=mt), 25.0)

    _run(test, backend, max_batch_tokens=40)


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
        await _until(lambda: first[0].started)
        for i in range(200):
            batcher.release(submit(*(f"{i} {k}" for k in range(40))))
        last = submit("stays")
        await _until(lambda: last[0].encoded)
        assert batcher.in_flight == 2
        assert sum(map(len, batcher._queues.values())) < 3000
        backend.go.release()
        backend.go.release()
        await last[0].future

    _run(test, backend)
    assert len(tokenised) < 500  # of 8,000


def test_nobody_hangs_when_the_log_cannot_be_written(monkeypatch):
    class Full:
        def error(self, *args, **kwargs):
            raise OSError("no space left on device")

        critical = error

    monkeypatch.setattr("scorekit.server.batching.log", Full())

    async def test(batcher, submit):
        (flight,) = submit("poison")
        assert (await flight.future).type == "model_failure"
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
    assert all("score" in o for o in run_batch(backend, encoded))
    assert set(alive) == {0}
