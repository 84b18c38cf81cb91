"""What the model gets next: neighbours in length, nobody forgotten, bulk never starved."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scorekit.server.backend import Encoded
from scorekit.server.queue.batch import make_cheapest_batches
from scorekit.server.queue.batch_queue import WINDOW, PriorityBatchQueue
from scorekit.server.queue.in_flight import InFlightSample


def flight(length, born=0.0, priority="interactive"):
    one = InFlightSample(b"", None, priority, 1, born)
    one.encoded = Encoded(length, {}, None)
    return one


def lengths(batch):
    return [f.encoded.length for f in batch]


def drain(lanes, now=0.0):
    batches = []
    while batch := lanes.take(now):
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
    lanes = PriorityBatchQueue(budget, bulk_patience_s=5.0)
    came, taken = [], []
    for now, flights in enumerate(arrivals):
        new = [flight(length, float(now), priority) for length, priority in flights]
        came += new
        lanes.put(new)
        for _ in range(takes):
            taken.append(lanes.take(float(now)))
    taken += drain(lanes, 99.0)
    assert sorted(map(id, came)) == sorted(id(f) for batch in taken for f in batch)
    for batch in taken:
        assert len({f.priority for f in batch}) <= 1
        assert len(batch) <= 1 or max(lengths(batch)) * len(batch) <= budget


def test_neighbours_in_length_share_a_batch_and_the_oldest_goes_first():
    lanes = PriorityBatchQueue(100, 10.0)
    lanes.put(flight(length) for length in (5, 50, 6, 49, 7))
    assert [lengths(b) for b in drain(lanes)] == [[7, 6, 5], [50, 49]]


def test_a_batch_with_room_left_waits_for_no_one_but_takes_what_has_come():
    lanes = PriorityBatchQueue(20, 10.0)
    lanes.put(flight(length) for length in (10, 10, 9))
    assert lengths(lanes.take(0.0)) == [10, 10]
    lanes.put([flight(8)])
    assert lengths(lanes.take(0.0)) == [9, 8]
    lanes.put([flight(4)])
    assert lengths(lanes.take(0.0)) == [4]


def test_a_long_sample_is_not_passed_over_for_ever():
    lanes = PriorityBatchQueue(10, 10.0)
    lanes.put([flight(100)])
    lanes.put(flight(1) for _ in range(2 * WINDOW))
    assert lengths(lanes.take(0.0)) == [100]


def test_interactive_goes_first_until_bulk_has_waited_too_long_then_they_alternate():
    lanes = PriorityBatchQueue(1, bulk_patience_s=5.0)
    lanes.put(flight(1, 0.0, "bulk") for _ in range(3))
    lanes.put(flight(1, 0.0) for _ in range(9))
    assert [lanes.take(now)[0].priority for now in (1.0, 2.0, 4.9)] == ["interactive"] * 3
    order = [lanes.take(6.0)[0].priority for _ in range(6)]
    assert order == ["bulk", "interactive"] * 3
    assert [b[0].priority for b in drain(lanes, 7.0)] == ["interactive"] * 3


def test_young_bulk_behind_old_bulk_waits_its_turn():
    lanes = PriorityBatchQueue(1, bulk_patience_s=5.0)
    lanes.put([flight(1, 0.0, "bulk"), flight(1, 6.0, "bulk")])
    lanes.put(flight(1, 6.0) for _ in range(3))
    assert [lanes.take(6.0)[0].priority for _ in range(4)] == ["bulk"] + ["interactive"] * 3


def test_who_left_is_skipped_and_purged_and_who_was_lifted_is_taken_once():
    lanes = PriorityBatchQueue(1, 10.0)
    flights = [flight(1) for _ in range(5)]
    lanes.put(flights)
    flights[0].is_abandoned = flights[3].is_abandoned = True
    lanes.put([flights[1]])  # it stands there already
    lanes.purge()
    assert len(lanes) == 3
    assert [batch[0] for batch in drain(lanes)] == [flights[1], flights[2], flights[4]]


def test_who_is_lifted_is_taken_once_and_among_the_interactive():
    lanes = PriorityBatchQueue(2, 10.0)
    flights = [flight(1, priority="bulk") for _ in range(3)]
    lanes.put(flights)
    flights[2].priority = "interactive"
    for _ in range(2):  # by two callers
        lanes.put([flights[2]])
    assert drain(lanes) == [[flights[2]], flights[:2]]


def test_a_smaller_budget_holds_at_once():
    lanes = PriorityBatchQueue(100, 10.0)
    lanes.put(flight(10) for _ in range(30))
    assert len(lanes.take(0.0)) == 10
    lanes.limit(20)
    assert [len(b) for b in drain(lanes)] == [2] * 10


def test_few_samples_of_unlike_length_do_not_share_a_batch():
    lanes = PriorityBatchQueue(256, 10.0)
    lanes.put(flight(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert [lengths(b) for b in drain(lanes)] == [[60, 60], [9, 9, 8, 8, 8, 8]]


def test_few_samples_that_a_cut_would_not_pay_for_stay_together():
    lanes = PriorityBatchQueue(16384, 10.0)
    lanes.put(flight(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert len(drain(lanes)) == 1


def test_among_few_a_newcomer_joins_its_equals():
    lanes = PriorityBatchQueue(256, 10.0)
    lanes.put(flight(length) for length in (60, 60, 8, 8))
    assert lengths(lanes.take(0.0)) == [60, 60]
    lanes.put([flight(8)])
    assert lengths(lanes.take(0.0)) == [8, 8, 8]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=7),
    st.integers(20, 300),
    st.floats(0, 60),
)
def test_the_fine_cut_is_the_cheapest_of_all(sizes, budget, cost):
    """Against every way to cut the sorted samples."""
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
