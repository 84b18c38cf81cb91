"""Check that small requests overtake long texts in windows and large requests."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.errors import SampleError
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.batcher import PIECE, TokenizerLine, TokenizeTask
from scorekit.server.fake import FakeBackend
from scorekit.server.local import score_encoded
from scorekit.server.pools import InFlightSample
from scorekit.server.windows import encode_in_windows
from testing.servers import PATIENCE_S
from tests.kits.batching import Gate, _run, _until
from tests.kits.examples import examples

#: Windows of at most 16 tokens, some of which fill a batch of 64.
LIMIT, BUDGET = 16, 64
HUGE = " ".join(f"word{k}." for k in range(600))


def alone(mt, backend=None):
    """Return the outcome of a windowed text scored without concurrent requests."""
    backend = backend or FakeBackend()
    options = MetricXOptions(overlong="windows", max_input_length=LIMIT)
    encoded = encode_in_windows(backend, [TranslationSample(src="s", mt=mt)], options)
    return score_encoded(backend, encoded, BUDGET)[0]


def in_windows(submit, mt, **options):
    return submit(mt, size=len(mt), overlong="windows", limit=LIMIT, **options)


async def in_the_model(caller):
    await _until(caller.is_in_the_model)


async def waiting(*callers):
    """Wait until all callers' samples are tokenized and in the model queue."""
    await _until(lambda: all(f.encoded for caller in callers for f in caller.flights))


async def batches_until(backend, caller):
    """Return the number of batches that the model finishes until the caller is answered."""
    before = len(backend.texts)
    while not caller.job.done.done():
        count = len(backend.texts)
        backend.open(1)
        await _until(lambda count=count: len(backend.texts) > count)
        await _until(lambda: backend.holds or caller.job.done.done())
        await asyncio.sleep(0)  # results were passed to the event loop before the next batch
    return len(backend.texts) - before


def test_a_word_waits_for_one_batch_of_a_huge_sample_and_not_for_all_its_windows():
    backend = Gate()

    async def test(batcher, submit):
        huge = in_windows(submit, HUGE)
        await in_the_model(huge)
        word = submit("word")
        await waiting(word)
        assert await batches_until(backend, word) == 2  # the current batch and its own
        assert not huge.job.done.done()
        backend.open(1000)
        (answer,) = await huge.answers()
        assert answer == alone(HUGE)
        assert len(backend.texts) > 10
        assert len(batcher.flights) == 0 and len(batcher.turns) == 0

    _run(test, backend, max_batch_tokens=BUDGET)


def test_a_word_waits_for_one_batch_of_a_request_of_many_samples():
    backend = Gate()

    async def test(batcher, submit):
        many = submit(*(f"{k} {'x ' * (k % 9)}" for k in range(400)), size=40)
        await in_the_model(many)
        await waiting(many)
        words = submit("word"), submit("another")
        await waiting(*words)
        assert await batches_until(backend, words[0]) == 2
        assert words[1].job.done.done()  # small requests share a batch
        assert backend.texts[1] == ["word", "another"]
        backend.open(1000)
        assert all("score" in answer for answer in await many.answers())

    _run(test, backend, max_batch_tokens=BUDGET)


def test_however_many_large_requests_there_are_small_ones_have_every_other_batch():
    backend = Gate()

    async def test(batcher, submit):
        large = [submit(*(f"{n} {k}" for k in range(80)), size=40) for n in range(3)]
        await in_the_model(large[0])
        words = [submit(f"word {k}") for k in range(40)]  # they need several batches
        await waiting(*large, *words)
        backend.open(1000)
        for caller in (*large, *words):
            await caller.job.done

    _run(test, backend, max_batch_tokens=BUDGET)
    owners = [text.split()[0] for text, *_ in backend.texts[1:]]
    small = [index for index, owner in enumerate(owners) if owner == "word"]
    assert small == list(range(0, 2 * len(small), 2)) and len(small) > 1
    large = [owner for owner in owners if owner != "word"]
    assert all(len(set(large[index : index + 3])) == 3 for index in range(0, 9, 3))  # in rotation


def test_a_word_passes_large_requests_and_bulk_that_has_waited_for_long():
    backend = Gate()

    async def test(batcher, submit):
        texts = [[f"{n} {k}" for k in range(80)] for n in range(6)]
        large = [submit(*texts[n], size=40) for n in range(3)]
        bulk = [submit(*texts[n], size=40, priority="bulk") for n in range(3, 6)]
        await waiting(*large, *bulk)
        word = submit("word")
        await waiting(word)
        assert await batches_until(backend, word) <= 4  # at most current, bulk, large, own
        backend.open(1000)
        for caller in (*large, *bulk):
            await caller.job.done

    _run(test, backend, max_batch_tokens=BUDGET, bulk_patience_s=0.0)


def test_windows_of_two_callers_take_turns():
    backend = Gate()
    other = HUGE.replace("word", "other")

    async def test(batcher, submit):
        first = in_windows(submit, HUGE)
        await in_the_model(first)
        second = in_windows(submit, other)
        await waiting(second)
        backend.open(1000)
        assert [*await first.answers(), *await second.answers()] == [alone(HUGE), alone(other)]

    _run(test, backend, max_batch_tokens=BUDGET)
    is_word = ["word" in batch[0] for batch in backend.texts]
    assert all(a != b for a, b in pairwise(is_word[1:-3]))


def test_windows_that_nobody_waits_for_any_more_are_not_scored():
    backend = Gate()

    async def test(batcher, submit):
        huge = in_windows(submit, HUGE)
        await in_the_model(huge)
        batcher.release(huge.job)
        assert len(batcher.flights) == 0 and batcher.tokens_in_use == 0
        repeated = in_windows(submit, HUGE)  # a new request is answered
        await waiting(repeated)
        batcher.release(repeated.job)
        word = submit("word")
        await waiting(word)
        backend.open(2)
        await word.job.done

    _run(test, backend, max_batch_tokens=BUDGET)
    assert len(backend.texts) == 2


def test_windows_that_two_wait_for_are_scored_once_and_go_on_when_one_leaves():
    backend = Gate()

    async def test(batcher, submit):
        first, second = in_windows(submit, HUGE), in_windows(submit, HUGE)
        await in_the_model(first)
        batcher.release(first.job)
        backend.open(1000)
        assert await second.answers() == [alone(HUGE)]

    _run(test, backend, max_batch_tokens=BUDGET)
    texts = [text for batch in backend.texts for text in batch]
    assert len(texts) == len(alone(HUGE)["windows"])


@pytest.mark.parametrize("bad, kind", [("nan", "non_finite"), ("poison", "model_failure")])
def test_a_window_that_fails_fails_its_sample_and_the_rest_is_not_scored(bad, kind):
    backend = Gate()
    backend.poison = "poison"
    count = len(alone(HUGE)["windows"])

    async def test(batcher, submit):
        concurrent = in_windows(submit, HUGE)
        huge = in_windows(submit, HUGE.replace("word0.", bad).replace("word", "term"))
        await waiting(concurrent, huge)
        await batches_until(backend, huge)
        (answer,) = await huge.answers()
        assert isinstance(answer, SampleError) and answer.type == kind
        assert answer.message.startswith(f"window 1 of {count}: ")
        backend.open(1000)
        assert await concurrent.answers() == [alone(HUGE)]
        assert len(batcher.flights) == 0 and len(batcher.turns) == 0

    _run(test, backend, max_batch_tokens=BUDGET)
    assert sum("term" in text for batch in backend.texts for text in batch) < count / 2


def test_windows_that_do_not_fit_the_memory_are_scored_in_smaller_batches():
    class Small(FakeBackend):
        def forward(self, batch):
            if len(batch) > 2 and self.batches:
                raise MemoryError("CUDA out of memory")
            return super().forward(batch)

    async def test(batcher, submit):
        assert await in_windows(submit, HUGE).answers() == [alone(HUGE)]
        assert batcher.model.max_tokens < 200

    _run(test, Small(), max_batch_tokens=200)


def test_what_a_small_request_wants_of_a_large_one_goes_with_the_small_ones():
    backend = Gate()

    async def test(batcher, submit):
        large = submit(*(f"{k} x" for k in range(200)), "wanted", size=40)
        await in_the_model(large)
        await waiting(large)
        small = submit("wanted")
        after = submit("after")
        await waiting(after)  # raised samples have been raised before it
        assert await batches_until(backend, small) == 2
        backend.open(1000)
        for caller in (large, after):
            await caller.job.done

    _run(test, backend, max_batch_tokens=BUDGET)
    texts = [text for batch in backend.texts for text in batch]
    assert sorted(texts) == sorted(set(texts))


def test_windows_of_bulk_are_lifted_by_who_waits_for_them():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await in_the_model(first)
        bulk = in_windows(submit, HUGE, priority="bulk")
        await waiting(bulk)
        now = in_windows(submit, HUGE)
        other_bulk = submit(*(f"{k}" for k in range(500)), size=40, priority="bulk")
        await waiting(other_bulk)
        pool = batcher.turns.pool_of(bulk.flights[0])
        assert bulk.flights[0].priority == "interactive"
        assert all(part.pool is pool for part in bulk.flights[0].parts)
        backend.open(1000)
        assert await now.answers() == await bulk.answers() == [alone(HUGE)]
        assert not other_bulk.job.done.done() or len(backend.texts) > 20
        await other_bulk.job.done

    _run(test, backend, max_batch_tokens=BUDGET)
    is_word = ["word" in batch[0] for batch in backend.texts[1:]]
    assert is_word == sorted(is_word, reverse=True)  # all windows before all other bulk


def test_while_a_text_is_cut_into_windows_others_are_tokenised_and_scored():
    go = threading.Event()

    class Cutting(FakeBackend):
        def encode(self, samples, options):
            if samples[0].mt != HUGE and "word7." in samples[0].mt:  # a part of it
                go.wait(PATIENCE_S)
            return super().encode(samples, options)

    async def test(batcher, submit):
        huge = in_windows(submit, HUGE)
        (answer,) = await submit("word").answers()
        assert "score" in answer and not huge.flights[0].encoded
        go.set()
        assert await huge.answers() == [alone(HUGE)]

    _run(test, Cutting(), max_batch_tokens=BUDGET)


def test_pieces_of_a_large_request_let_others_be_tokenised():
    line = TokenizerLine(threading.Condition(), PIECE)

    def put(job, count, priority="interactive"):
        flights = [InFlightSample(b"", None, priority, 1, 0.0) for _ in range(count)]
        line.put(TokenizeTask(job, flights, None, priority))

    def jobs(count):
        names = []
        for _ in range(count):
            task, _ = line.take()
            names.append(task.job)
            line.put_back(task)
        return " ".join(names)

    put("large", 5 * PIECE)
    assert jobs(1) == "large"
    put("small", 1)
    put("other", 2 * PIECE)
    assert jobs(7) == "large small other large other large large"
    put("bulk", 2 * PIECE, "bulk")  # of bulk, one request at a time
    put("more", PIECE, "bulk")
    put("last", PIECE, "bulk")
    put("small", 1)
    assert jobs(3) == "bulk small bulk"
    put("small", 1)
    assert jobs(3) == "more small last"
    line.stop()
    assert line.take() is None


def test_who_joins_bulk_that_is_not_tokenised_yet_does_not_wait_for_its_turn():
    go = threading.Event()
    order = []

    class Slow(FakeBackend):
        def encode(self, samples, options):
            if samples[0].mt == "0":
                go.wait(PATIENCE_S)
            order.append(samples[0].mt)
            return super().encode(samples, options)

    async def test(batcher, submit):
        order.clear()
        bulk = submit(*(f"{k}" for k in range(PIECE + 1)), priority="bulk")
        more = submit("joined", priority="bulk")
        now = submit("joined")
        go.set()
        await now.job.done
        assert await more.answers() == await now.answers()
        await bulk.job.done
        assert order == ["0", "joined", f"{PIECE}"]

    _run(test, Slow())


TEXTS = [f"text{n}. " * count for n, count in enumerate((1, 3, 20, 90, 200))] + [
    "a nan. " * 30,
    "a poison. " * 40,
]


@settings(max_examples=examples(25))
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4),
            st.sampled_from(["interactive", "bulk"]),
            st.sampled_from(["stays", "leaves at once", "leaves later"]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0.0, 10.0]),
)
def test_whoever_comes_and_goes_each_sample_in_windows_has_its_own_outcome(requests, patience_s):
    backend = FakeBackend(poison="poison")

    async def test(batcher, submit):
        staying = []
        for texts, priority, when_cancelled in requests:
            size = max(map(len, texts))
            caller = submit(*texts, size=size, overlong="windows", limit=LIMIT, priority=priority)
            if when_cancelled == "leaves at once":
                batcher.release(caller.job)
            elif when_cancelled == "leaves later":
                asyncio.get_running_loop().call_later(0.002, batcher.release, caller.job)
            else:
                staying.append((texts, caller))
        for texts, caller in staying:
            for text, answer in zip(texts, await caller.answers(), strict=True):
                if "nan" in text or "poison" in text:
                    assert answer.type == ("non_finite" if "nan" in text else "model_failure")
                else:
                    assert answer == alone(text)
        await _until(lambda: len(batcher.flights) == 0)
        assert batcher.tokens_in_use == 0

    _run(test, backend, max_batch_tokens=BUDGET, bulk_patience_s=patience_s)


@pytest.mark.parametrize("own_batches", [False, True])
def test_it_is_said_when_a_small_request_waits_for_long_and_until_it_waits_half_as_long(
    own_batches,
):
    backend = Gate()

    async def test(batcher, submit):
        large = submit(*(f"{k}" for k in range(100)), size=400)
        await in_the_model(large)
        bulk = submit("bulk", priority="bulk")
        for flight in (*large.flights, *bulk.flights):  # these may wait
            flight.enqueued_at -= 1000.0
        word = submit("word")
        assert batcher.unhealthy_reason() is None
        waits = word.flights[0]

        def fault_after(seconds):
            waits.enqueued_at = time.monotonic() - seconds
            return batcher.unhealthy_reason()

        assert fault_after(250.0) is None
        assert fault_after(301.0) == "a small request has waited 301 s for the model"
        assert fault_after(250.0) == "a small request has waited 250 s for the model"
        submit("taken all the same")
        assert fault_after(149.0) is None
        assert fault_after(250.0) is None
        assert fault_after(301.0) is not None
        for line, min_wait_s in (("small", 301), ("large", 1000), ("bulk", 1000)):
            assert batcher.longest_wait(line) >= min_wait_s
        backend.open(1000)
        await word.job.done
        assert batcher.unhealthy_reason() is None

    _run(test, backend, max_batch_tokens=BUDGET, timeout_s=600.0, own_batches=own_batches)
