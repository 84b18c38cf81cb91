"""Check the batcher while callers of all kinds come, join, leave and time out at once."""

from __future__ import annotations

import asyncio
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from tests.kits.batching import _run, _until
from tests.kits.examples import examples

#: Some texts fill several windows of 16 tokens; 5 fails its batch, 6 has no finite score.
TEXTS = ["a", "b " * 3, "c " * 8, "d. " * 40, "e. " * 150, "poison " * 2, "nan. " * 30]
CALLERS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), min_size=1, max_size=12),  # texts of a request
        st.sampled_from(["interactive", "bulk"]),
        st.sampled_from(["truncate", "windows"]),
        st.sampled_from([4, 400]),  # bytes of a text: many large ones are a large request
        st.sampled_from(["stays", "stays", "leaves", "leaves later", "times out"]),
        st.sampled_from([0.0, 0.0, 0.001]),  # pause before the next one
    ),
    min_size=1,
    max_size=16,
)


class Burning(FakeBackend):
    """A model and a tokenizer that need the interpreter, and threads that notice each other."""

    def __init__(self, burn_s):
        super().__init__(poison="poison")
        self.burn_s = burn_s
        self.scored = []

    def encode(self, samples, options):
        self._burn(self.burn_s / 4)
        return super().encode(samples, options)

    def forward(self, batch):
        self._burn(self.burn_s)
        outcomes = super().forward(batch)
        self.scored += [(e.payload.mt, len(batch)) for e in batch]
        return outcomes

    def _burn(self, seconds):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


def mt_of(number):
    return f"{number}: " + TEXTS[number % len(TEXTS)]


def check_answer(number, answer, overlong):
    text = mt_of(number)
    if "poison" in text:
        assert answer.type == "model_failure"
    elif "nan" in text:
        assert answer.type == "non_finite"
    else:
        assert answer["mt_covered"] == len(text)
        is_cut = len(text.split()) + 2 > 16
        assert ("windows" in answer) == (is_cut and overlong == "windows")
        if "windows" not in answer:
            assert answer["score"] == fake_score(TranslationSample(src="s", mt=text), 25.0)


@settings(max_examples=examples(20), deadline=None)
@given(
    CALLERS,
    st.sampled_from([0.0, 0.0005]),
    st.sampled_from([0.0, 0.01, 10.0]),
    st.sampled_from(["ends", "drains"]),
)
def test_callers_of_all_kinds_get_their_answers_and_nothing_stays(callers, burn_s, patience_s, end):
    backend = Burning(burn_s)
    answered = []

    async def test(batcher, submit):
        loop = asyncio.get_running_loop()
        staying, jobs = [], []
        for numbers, priority, overlong, size, ending, pause in callers:
            # Requests that are read in another way have other keys.
            texts = [mt_of(number) for number in numbers]
            try:
                caller = submit(
                    *texts, priority=priority, overlong=overlong, size=size, limit=16, key=overlong
                )
            except RequestError as error:
                assert error.type == "overloaded"
                continue
            job = caller.job
            jobs.append(job)
            job.on_answer = lambda index, job=job: answered.append((id(job), index))
            if ending == "leaves":
                batcher.release(job)
            elif ending == "leaves later":
                loop.call_later(0.002, batcher.release, job)
            elif ending == "times out":
                loop.call_later(0.001, job.finish)
                loop.call_later(0.001, batcher.release, job)
            else:
                staying.append((numbers, overlong, caller))
            if pause:
                await asyncio.sleep(pause)
        if end == "drains":
            await asyncio.to_thread(batcher.stop, 5.0)
            assert not any(thread.is_alive() for thread in batcher._threads)
            await asyncio.sleep(0)
        for numbers, overlong, caller in staying:
            if end == "ends":
                await caller.job.done
            for number, answer in zip(numbers, caller.job.answers, strict=True):
                if answer is not None:
                    seen = answer if isinstance(answer, SampleError) else from_json(answer)
                    check_answer(number, seen, overlong)
            assert end == "drains" or None not in caller.job.answers
            batcher.release(caller.job)
        assert len(answered) == len(set(answered))
        if end == "ends":
            await _until(lambda: not batcher.flights)
        else:  # what the threads had in hand
            for job in jobs:
                batcher.release(job)
            assert all(sample.is_dispatched for sample in batcher.flights.values())
        assert batcher.tokens_in_use == sum(f.token_cost for f in batcher.flights.values())
        assert len(batcher.turns) == 0
        assert (
            not batcher.turns._of_requests["interactive"] and not batcher.turns._of_requests["bulk"]
        )
        assert not batcher.changed._is_owned() and threading.active_count() < 50

    _run(test, backend, max_batch_tokens=64, bulk_patience_s=patience_s, max_queue_items=60)
