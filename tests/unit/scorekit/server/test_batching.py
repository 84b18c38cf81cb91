"""Check which samples share a batch, which wait and which are refused."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from scorekit.errors import RequestError
from scorekit.schemas import TranslationSample
from scorekit.server.backend import Encoded
from scorekit.server.batches import make_batches
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import PATIENCE_S
from tests.kits.batching import Gate, _run, _until
from tests.kits.examples import examples

LENGTHS = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([1, 3])), max_size=200)


@given(LENGTHS, st.integers(1, 4000), st.one_of(st.none(), st.integers(1, 20)))
def test_batches_hold_every_sample_once_within_the_budget(lengths, max_tokens, max_items):
    batches = make_batches(lengths, max_tokens, max_items)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i][0] for i in batch) * sum(lengths[i][1] for i in batch)
        assert padded <= max_tokens or len(batch) == 1
        assert max_items is None or len(batch) <= max_items


@given(LENGTHS.filter(len))
def test_a_batch_holds_neighbours_in_length(lengths):
    order = [lengths[i][0] for batch in make_batches(lengths, 2000) for i in batch]
    assert order == sorted(order, reverse=True)


def test_requests_of_different_callers_share_a_batch():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(first.is_in_the_model)
        other_callers = [submit(f"caller {i}") for i in range(5)]
        await _until(lambda: all(o.flights[0].encoded for o in other_callers))
        backend.open(2)
        for caller in (first, *other_callers):
            await caller.job.done
        assert sorted(backend.texts[1]) == [f"caller {i}" for i in range(5)]

    _run(test, backend)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_with_own_batches_a_request_is_cut_into_batches_as_if_it_were_alone(priority):
    requests = [[f"{'w ' * length}{name}" for length in (1, 5, 9, 2)] for name in "abcde"]
    alone = []
    for is_crowded in (False, True):
        backend = Gate()

        async def test(batcher, submit, backend=backend, is_crowded=is_crowded):
            first = submit("opens the model")
            await _until(lambda: first.flights[0].is_dispatched)
            chosen = requests if is_crowded else requests[:1]
            callers = [submit(*texts, priority=priority) for texts in chosen]
            await _until(lambda: all(f.encoded for caller in callers for f in caller.flights))
            backend.open(100)
            for caller in callers:
                await caller.job.done

        _run(test, backend, max_batch_tokens=24, own_batches=True)
        batches = [[text.replace(text[-1], "a") for text in batch] for batch in backend.texts[1:]]
        assert all(len({text[-1] for text in batch}) == 1 for batch in backend.texts[1:])
        if not is_crowded:
            alone = batches
            assert 1 < len(alone) < 4
        else:
            assert sorted(batches) == sorted(alone * len(requests))


def test_equal_samples_in_flight_are_scored_once_and_answer_every_request():
    backend = FakeBackend(seconds_per_batch=0.01)

    async def test(batcher, submit):
        first, second = submit("a", "b", "a"), submit("b", "a")
        a, b, repeated = await first.answers()
        assert a == repeated != b
        assert await second.answers() == [b, a]

    _run(test, backend)
    assert sum(backend.batches) == 2


def test_who_leaves_among_many_does_not_look_at_the_others():
    backend = Gate()

    async def test(batcher, submit):
        samples = ("a", "b", "a")
        two_callers = [submit(*samples) for _ in range(2)]
        steps = [_steps(batcher.release, two_callers[0].job)]
        callers = [submit(*samples) for _ in range(200)]
        steps += [_steps(batcher.release, caller.job) for caller in (callers[150], callers[0])]
        assert len(set(steps)) == 1 and steps[0] > 0
        backend.open(2)
        a, b, repeated = await two_callers[1].answers()
        for caller in (*callers[1:150], *callers[151:]):
            assert await caller.answers() == [a, b, repeated]
        for caller in (two_callers[0], callers[0], callers[150]):
            assert caller.job.answers == [None] * 3

    _run(test, backend)


def _steps(function, *args):
    """Return the number of operations that Python runs in a call."""
    steps = 0

    def trace(frame, event, _):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return steps


def test_interactive_goes_before_bulk_and_lifts_what_it_joins():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(first.is_in_the_model)
        bulk = submit("bulk 1", "bulk 2", "wanted", priority="bulk")
        await _until(lambda: all(f.encoded for f in bulk.flights))
        now = submit("now", "wanted")
        last = submit("last")
        await _until(lambda: last.flights[0].encoded)  # raised samples have been raised before it
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
        await _until(first.is_in_the_model)
        leaver, stayer = submit("left", "shared"), submit("shared")
        await _until(lambda: all(f.encoded for f in leaver.flights))
        batcher.release(leaver.job)
        backend.open(2)
        await first.job.done
        (answer,) = await stayer.answers()
        assert "score" in answer
        assert leaver.job.answers == [None, None]
        assert backend.texts[1] == ["shared"]
        assert len(batcher.flights) == 0

    _run(test, backend)


def test_what_the_model_has_is_scored_for_the_cache_though_its_caller_has_left():
    backend = Gate()

    async def test(batcher, submit):
        caller = submit("in the model")
        await _until(caller.is_in_the_model)
        batcher.release(caller.job)
        assert len(batcher.flights) == 1
        joins = submit("in the model")
        backend.open(1)
        (answer,) = await joins.answers()
        assert "score" in answer and not batcher.flights

    stored = _run(test, backend)
    assert backend.texts == [["in the model"]]
    assert [list(results) for results in stored] == [[b"in the model"]]


def test_a_full_queue_refuses_the_whole_request_and_keeps_nothing_of_it():
    backend = Gate()

    async def test(batcher, submit):
        submit(*(f"mt {i}" for i in range(8)))
        with pytest.raises(RequestError) as refused:
            submit("x", "y", "z")
        assert refused.value.type == "overloaded" and refused.value.retry_after >= 1
        assert len(batcher.flights) == 8
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
        assert batcher.tokens_in_use == 0
        backend.open(2)
        await submit("e", "f").job.done

    _run(test, backend, max_queue_tokens=4)


def test_a_document_in_windows_takes_all_its_tokens_of_the_room():
    """Check a truncated document, which takes the fake model's limit of 512 tokens."""

    async def test(batcher, submit):
        cut = submit("cut", size=40_000)
        assert batcher.tokens_in_use == 512
        await cut.job.done
        windowed = submit("whole", size=40_000, overlong="windows")
        assert batcher.tokens_in_use == 10_001
        await windowed.job.done
        assert batcher.tokens_in_use == 0
        with pytest.raises(RequestError) as hopeless:
            submit("longer", size=80_000, overlong="windows")
        assert hopeless.value.type == "too_large"
        await submit("longer", size=80_000).job.done

    _run(test, max_queue_tokens=20_000)


def test_only_good_results_are_handed_to_the_cache():
    async def test(batcher, submit):
        for caller in (submit("good", "nan"), submit("unwanted", cache=False)):
            await caller.job.done

    (stored,) = [results for results in _run(test) if results]
    assert list(stored) == [b"good"]
    assert from_json(stored[b"good"])["score"] == fake_score(
        TranslationSample(src="s", mt="good"), 25.0
    )


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


@settings(max_examples=examples(25))
@given(REQUESTS, st.sampled_from([0.0, 0.001]), st.sampled_from([0.0, 10.0]))
def test_every_waiter_gets_exactly_one_answer_its_own(requests, batch_s, patience_s):
    """Check repeated texts; 7 fails its batch, 11 has no finite score, and callers may cancel."""
    backend = FakeBackend(seconds_per_batch=batch_s, poison="7")
    answered, callers = [], []  # keeps cancelled callers, too, so that no job id repeats

    def mt_of(text):
        return f"{text} " * (text + 1) + ("nan" if text == 11 else "")

    async def test(batcher, submit):
        staying = []
        for texts, priority, when_cancelled, pause in requests:
            caller = submit(*map(mt_of, texts), priority=priority)
            callers.append(caller)
            caller.job.on_answer = lambda index, job=caller.job: answered.append((id(job), index))
            if when_cancelled == "leaves at once":
                batcher.release(caller.job)
            elif when_cancelled == "leaves later":
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
        await _until(lambda: len(batcher.flights) == 0)
        assert batcher.tokens_in_use == 0

    _run(test, backend, max_batch_tokens=40, bulk_patience_s=patience_s)


def test_encoded_is_small():
    assert not hasattr(Encoded(1, {}, None), "__dict__")


def test_given_up_samples_are_neither_tokenised_nor_kept():
    tokenized_texts = []

    class Counting(Gate):
        def encode(self, samples, options):
            tokenized_texts.extend(s.mt for s in samples)
            time.sleep(0.01)
            return super().encode(samples, options)

    backend = Counting()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(first.is_in_the_model)
        for i in range(200):
            batcher.release(submit(*(f"{i} {k}" for k in range(40))).job)
        last = submit("stays")
        await _until(lambda: last.flights[0].encoded)
        assert len(batcher.flights) == 2
        assert len(batcher.turns) < 3000
        backend.open(2)
        await last.job.done

    _run(test, backend)
    assert len(tokenized_texts) < 500  # of 8,000


def test_bulk_is_tokenised_however_much_interactive_work_there_is():
    class Slow(FakeBackend):
        def encode(self, samples, options):
            time.sleep(0.002)
            return super().encode(samples, options)

    async def test(batcher, submit):
        bulk = submit("bulk", priority="bulk")
        interactive = []
        while not bulk.job.done.done():  # at least ten tasks wait
            interactive = [o for o in interactive if not o.job.done.done()]
            interactive += [submit(f"{time.monotonic_ns()}") for _ in range(20 - len(interactive))]
            await asyncio.sleep(0)

    _run(test, Slow(), bulk_patience_s=0.02)


def test_a_lifted_sample_is_scored_once():
    backend = Gate()
    go = threading.Event()

    class Slow(Gate):
        def encode(self, samples, options):
            if samples[0].mt == "bulk":
                go.wait(PATIENCE_S)
            return super().encode(samples, options)

    backend = Slow()

    async def test(batcher, submit):
        first = submit("opens the model")
        await _until(first.is_in_the_model)
        bulk = submit("bulk", "wanted", priority="bulk")
        now = submit("wanted")  # while it is being tokenized
        go.set()
        last = submit("last")
        await _until(lambda: last.flights[0].encoded)
        also = submit("later", priority="bulk")
        later = submit("later")  # perhaps before it is tokenized
        await _until(lambda: also.flights[0].encoded)
        after = submit("after", priority="bulk")
        await _until(lambda: after.flights[0].encoded)
        backend.open(4)
        for caller in (bulk, now, last, also, later, after):
            await caller.job.done

    _run(test, backend)
    texts = [text for batch in backend.texts for text in batch]
    assert sorted(texts) == sorted(set(texts))


def test_the_threads_end_after_the_batch_in_hand():
    backend = Gate()

    async def test(batcher, submit):
        first = submit("in hand")
        await _until(first.is_in_the_model)
        waiting = submit("waits")
        await _until(lambda: waiting.flights[0].encoded)
        batcher.stop()
        backend.open(2)
        await _until(lambda: not any(thread.is_alive() for thread in batcher._threads))

    _run(test, backend)
    assert backend.texts == [["in hand"]]


def test_idle_threads_hold_no_sample_of_the_last_request():
    async def test(batcher, submit):
        caller = submit(*map(str, range(20)))
        items = [weakref.ref(sample.item) for sample in caller.flights]
        await caller.answers()
        batcher.release(caller.job)
        del caller
        await _until(lambda: all(item() is None for item in items))

    _run(test)
