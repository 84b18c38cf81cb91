"""Check batch selection: similar lengths together, no starved samples, no starved bulk work."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scorekit.server.backend import Encoded
from scorekit.server.queue.batch import make_cheapest_batches
from scorekit.server.queue.batch_queue import WINDOW, PriorityBatchQueue
from scorekit.server.queue.in_flight import InFlightSample


def flight(length, enqueued_at=0.0, priority="interactive"):
    sample = InFlightSample(b"", None, priority, 1, enqueued_at)
    sample.encoded = Encoded(length, {}, None)
    return sample


def lengths(batch):
    return [f.encoded.length for f in batch]


def drain(queue, now=0.0):
    batches = []
    while batch := queue.take(now):
        batches.append(batch)
    return batches


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 300), st.sampled_from(["interactive", "bulk"])), max_size=40
        ),
        max_size=12,
    ),
    st.integers(1, 1000),
    st.integers(0, 3),
)
def test_every_flight_is_taken_once_within_the_budget(arrivals, budget, takes):
    queue = PriorityBatchQueue(budget, bulk_patience_s=5.0)
    arrived, batches = [], []
    for now, flights in enumerate(arrivals):
        new = [flight(length, float(now), priority) for length, priority in flights]
        arrived += new
        queue.put(new)
        for _ in range(takes):
            batches.append(queue.take(float(now)))
    batches += drain(queue, 99.0)
    assert sorted(map(id, arrived)) == sorted(id(f) for batch in batches for f in batch)
    for batch in batches:
        assert len({f.priority for f in batch}) <= 1
        assert len(batch) <= 1 or max(lengths(batch)) * len(batch) <= budget


def test_neighbours_in_length_share_a_batch_and_the_oldest_goes_first():
    queue = PriorityBatchQueue(100, 10.0)
    queue.put(flight(length) for length in (5, 50, 6, 49, 7))
    assert [lengths(b) for b in drain(queue)] == [[7, 6, 5], [50, 49]]


def test_a_batch_with_room_left_waits_for_no_one_but_takes_what_has_come():
    queue = PriorityBatchQueue(20, 10.0)
    queue.put(flight(length) for length in (10, 10, 9))
    assert lengths(queue.take(0.0)) == [10, 10]
    queue.put([flight(8)])
    assert lengths(queue.take(0.0)) == [9, 8]
    queue.put([flight(4)])
    assert lengths(queue.take(0.0)) == [4]


def test_a_long_sample_is_not_passed_over_for_ever():
    queue = PriorityBatchQueue(10, 10.0)
    queue.put([flight(100)])
    queue.put(flight(1) for _ in range(2 * WINDOW))
    assert lengths(queue.take(0.0)) == [100]


def test_interactive_goes_first_until_bulk_has_waited_too_long_then_they_alternate():
    queue = PriorityBatchQueue(1, bulk_patience_s=5.0)
    queue.put(flight(1, 0.0, "bulk") for _ in range(3))
    queue.put(flight(1, 0.0) for _ in range(9))
    assert [queue.take(now)[0].priority for now in (1.0, 2.0, 4.9)] == ["interactive"] * 3
    order = [queue.take(6.0)[0].priority for _ in range(6)]
    assert order == ["bulk", "interactive"] * 3
    assert [b[0].priority for b in drain(queue, 7.0)] == ["interactive"] * 3


def test_young_bulk_behind_old_bulk_waits_its_turn():
    queue = PriorityBatchQueue(1, bulk_patience_s=5.0)
    queue.put([flight(1, 0.0, "bulk"), flight(1, 6.0, "bulk")])
    queue.put(flight(1, 6.0) for _ in range(3))
    assert [queue.take(6.0)[0].priority for _ in range(4)] == ["bulk"] + ["interactive"] * 3


def test_who_left_is_skipped_and_purged_and_who_was_lifted_is_taken_once():
    queue = PriorityBatchQueue(1, 10.0)
    flights = [flight(1) for _ in range(5)]
    queue.put(flights)
    flights[0].is_abandoned = flights[3].is_abandoned = True
    queue.put([flights[1]])  # it is queued already
    queue.purge()
    assert len(queue) == 3
    assert [batch[0] for batch in drain(queue)] == [flights[1], flights[2], flights[4]]


def test_who_is_lifted_is_taken_once_and_among_the_interactive():
    queue = PriorityBatchQueue(2, 10.0)
    flights = [flight(1, priority="bulk") for _ in range(3)]
    queue.put(flights)
    flights[2].priority = "interactive"
    for _ in range(2):  # for two callers
        queue.put([flights[2]])
    assert drain(queue) == [[flights[2]], flights[:2]]


def test_a_smaller_budget_holds_at_once():
    queue = PriorityBatchQueue(100, 10.0)
    queue.put(flight(10) for _ in range(30))
    assert len(queue.take(0.0)) == 10
    queue.limit(20)
    assert [len(b) for b in drain(queue)] == [2] * 10


def test_few_samples_of_unlike_length_do_not_share_a_batch():
    queue = PriorityBatchQueue(256, 10.0)
    queue.put(flight(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert [lengths(b) for b in drain(queue)] == [[60, 60], [9, 9, 8, 8, 8, 8]]


def test_few_samples_that_a_cut_would_not_pay_for_stay_together():
    queue = PriorityBatchQueue(16384, 10.0)
    queue.put(flight(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert len(drain(queue)) == 1


def test_among_few_a_newcomer_joins_its_equals():
    queue = PriorityBatchQueue(256, 10.0)
    queue.put(flight(length) for length in (60, 60, 8, 8))
    assert lengths(queue.take(0.0)) == [60, 60]
    queue.put([flight(8)])
    assert lengths(queue.take(0.0)) == [8, 8, 8]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=7),
    st.integers(20, 300),
    st.floats(0, 60),
)
def test_the_fine_cut_is_the_cheapest_of_all(sizes, budget, cost):
    """Compare with the cheapest of all ways to cut the sorted samples."""
    batches = make_cheapest_batches(sizes, budget, cost)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    spent = sum(cost + _padded(sizes, batch) for batch in batches)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i][0])
    for cuts in itertools.product((False, True), repeat=len(sizes) - 1):
        ends = [k + 1 for k, cut in enumerate(cuts) if cut]
        parts = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]
        if all(len(part) == 1 or _padded(sizes, part) <= budget for part in parts):
            assert spent <= sum(cost + _padded(sizes, part) for part in parts) + 1e-6
    assert all(len(batch) == 1 or _padded(sizes, batch) <= budget for batch in batches)


def _padded(sizes, batch):
    return max(sizes[i][0] for i in batch) * sum(sizes[i][1] for i in batch)
