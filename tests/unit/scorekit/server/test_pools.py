"""Check batch selection: similar lengths together, no starved samples, no starved bulk work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.server.backend import Encoded
from scorekit.server.pools import BATCH_COST, BatchPool, InFlightSample, PoolTurns, QueuedPart


def part(length, enqueued_at=0.0, priority="interactive", line=None, rows=1):
    sample = InFlightSample(b"", None, priority, 1, enqueued_at, pool_owner=line)
    sample.encoded = Encoded(length, {}, None, rows)
    sample.parts = [QueuedPart(sample, sample.encoded)]
    return sample.parts[0]


def lengths(batch):
    return [p.encoded.length for p in batch]


def take(turns, budget, now=0.0):
    return turns.take(budget, now)


def drain(turns, budget, now=0.0):
    batches = []
    while batch := take(turns, budget, now):
        batches.append(batch)
    return batches


def padded(batch):
    return max(lengths(batch)) * sum(p.encoded.rows for p in batch)


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(1, 300),
                st.sampled_from(["interactive", "bulk"]),
                st.sampled_from([None, "one", "two"]),
                st.sampled_from([1, 3]),
            ),
            max_size=40,
        ),
        max_size=12,
    ),
    st.integers(1, 1000),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_every_part_is_taken_or_removed_once_within_the_budget(arrivals, budget, takes, chance):
    turns = PoolTurns(bulk_patience_s=5.0)
    arrived, batches, removed = [], [], []
    for now, specs in enumerate(arrivals):
        new = [
            part(length, float(now), priority, line, rows) for length, priority, line, rows in specs
        ]
        arrived += new
        turns.put(new)
        for _ in range(takes):
            batches.append(take(turns, budget, float(now)))
        chosen = chance.sample(arrived, len(arrived) // 3)
        if chance.random() < 0.5:  # who left
            removed += turns.remove(chosen)
        else:  # who was lifted
            lifted = turns.remove(chosen)
            for p in lifted:
                p.sample.priority, p.sample.pool_owner = "interactive", None
            turns.put(lifted)
    batches += drain(turns, budget, 99.0)
    all_taken = [p for batch in batches for p in batch]
    assert sorted(map(id, arrived)) == sorted(map(id, all_taken + removed))
    assert len(turns) == 0 and all(p.pool is None for p in arrived)
    for batch in filter(None, batches):
        assert len({(p.sample.priority, p.sample.pool_owner) for p in batch}) == 1
        assert len(batch) == 1 or padded(batch) <= budget
        assert lengths(batch) == sorted(lengths(batch), reverse=True)
    assert turns.take(budget, 99.0) == []
    assert not any(turns._of_requests.values())
    assert all(pool._rows == pool._tokens == 0 for pool in turns._small.values())


def test_neighbours_in_length_share_a_batch_and_the_oldest_goes_first():
    turns = PoolTurns(10.0)
    turns.put(part(length) for length in (5, 50, 6, 49, 7))
    assert [lengths(b) for b in drain(turns, 100)] == [[7, 6, 5], [50, 49]]


def test_a_batch_with_room_left_waits_for_no_one_but_takes_what_has_come():
    turns = PoolTurns(10.0)
    turns.put(part(length) for length in (10, 10, 9))
    assert lengths(take(turns, 20)) == [10, 10]
    turns.put([part(8)])
    assert lengths(take(turns, 20)) == [9, 8]
    turns.put([part(4)])
    assert lengths(take(turns, 20)) == [4]


def test_a_long_sample_is_not_passed_over_for_ever():
    turns = PoolTurns(10.0)
    turns.put([part(100)])
    turns.put(part(1) for _ in range(4096))
    assert lengths(take(turns, 10)) == [100]


def test_equals_in_length_are_taken_by_age():
    turns = PoolTurns(10.0)
    parts = [part(3) for _ in range(5)]
    turns.put(parts)
    assert drain(turns, 9) == [parts[:3], parts[3:]]


def test_interactive_goes_first_until_bulk_has_waited_too_long_then_they_alternate():
    turns = PoolTurns(bulk_patience_s=5.0)
    turns.put(part(1, 0.0, "bulk") for _ in range(3))
    turns.put(part(1, 0.0) for _ in range(9))

    def priorities(times):
        return [take(turns, 1, now)[0].sample.priority for now in times]

    assert priorities([1.0, 2.0, 4.9]) == ["interactive"] * 3
    assert priorities([6.0] * 6) == ["bulk", "interactive"] * 3
    assert [b[0].sample.priority for b in drain(turns, 1, 7.0)] == ["interactive"] * 3


def test_young_bulk_behind_old_bulk_waits_its_turn():
    turns = PoolTurns(bulk_patience_s=5.0)
    turns.put([part(1, 0.0, "bulk"), part(1, 6.0, "bulk")])
    turns.put(part(1, 6.0) for _ in range(3))
    order = [take(turns, 1, 6.0)[0].sample.priority for _ in range(4)]
    assert order == ["bulk"] + ["interactive"] * 3


def test_bulk_that_was_tokenized_late_is_late_by_its_request():
    turns = PoolTurns(bulk_patience_s=5.0)
    turns.put([part(1, 4.0, "bulk", line="one"), part(2, 7.0), part(3, 7.0)])
    assert lengths(take(turns, 2, 8.0)) == [2]  # none is late before 9
    turns.put([part(4, 3.0, "bulk", line="two")])  # that is late from 8 on
    assert [lengths(take(turns, 2, 8.0)) for _ in range(4)] == [[1], [3], [4], []]


def test_large_requests_rotate_and_small_ones_have_every_other_turn():
    turns = PoolTurns(10.0)
    for line in ("a", "b"):
        turns.put(part(1, line=line) for _ in range(3))
    turns.put(part(1) for _ in range(3))
    lines = [batch[0].sample.pool_owner for batch in drain(turns, 1)]
    assert lines == [None, "a", None, "b", None, "a", "b", "a", "b"]


@pytest.mark.parametrize("removed", [1, 40])
def test_who_left_is_not_taken(removed):
    turns = PoolTurns(10.0)
    parts = [part(length) for length in range(1, 61)]
    turns.put(parts)
    assert turns.remove(parts[:removed] * 2) == parts[:removed] * 2
    assert turns.remove(parts[:removed]) == []
    assert sorted(lengths(p for b in drain(turns, 99) for p in b)) == [*range(removed + 1, 61)]


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_a_turn_does_not_look_at_all_pools(priority, monkeypatch):
    looked = []
    oldest, length = BatchPool.oldest_sample, BatchPool.__len__
    monkeypatch.setattr(
        BatchPool, "oldest_sample", lambda pool: looked.append(pool) or oldest(pool)
    )
    monkeypatch.setattr(BatchPool, "__len__", lambda pool: looked.append(pool) or length(pool))
    turns = PoolTurns(bulk_patience_s=5.0)
    parts = [part(10, 1.0, priority, line=number) for number in range(400)]
    turns.put(parts)
    looked.clear()
    turns.remove(parts[:10])
    batches = [turns.take(100, now) for now in (1.0, 2.0, 3.0, 6.0, 7.0)]
    assert [len(batch) for batch in batches] == [1] * 5
    assert len(looked) < 100


def test_who_is_lifted_is_taken_once_and_among_the_interactive():
    turns = PoolTurns(10.0)
    parts = [part(1, priority="bulk") for _ in range(3)]
    turns.put(parts)
    parts[2].sample.priority = "interactive"
    turns.put(turns.remove([parts[2]]))
    assert drain(turns, 2) == [[parts[2]], parts[:2]]


def test_a_smaller_budget_holds_at_once():
    turns = PoolTurns(10.0)
    turns.put(part(10) for _ in range(30))
    assert len(take(turns, 100)) == 10
    assert [len(b) for b in drain(turns, 20)] == [2] * 10


def test_few_samples_of_unlike_length_do_not_share_a_batch():
    turns = PoolTurns(10.0)
    turns.put(part(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert [lengths(b) for b in drain(turns, 256)] == [[60, 60], [9, 9, 8, 8, 8, 8]]


def test_few_samples_that_a_cut_would_not_pay_for_stay_together():
    turns = PoolTurns(10.0)
    turns.put(part(length) for length in (60, 8, 8, 9, 60, 8, 9, 8))
    assert len(drain(turns, 16384)) == 1


def test_among_few_a_newcomer_joins_its_equals():
    turns = PoolTurns(10.0)
    turns.put(part(length) for length in (60, 60, 8, 8))
    assert lengths(take(turns, 256)) == [60, 60]
    turns.put([part(8)])
    assert lengths(take(turns, 256)) == [8, 8, 8]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=7),
    st.integers(20, 300),
)
def test_few_samples_never_cost_more_than_one_batch_of_all(sizes, budget):
    parts = [part(length, rows=rows) for length, rows in sizes]
    pool = BatchPool()
    pool.put(parts)
    real = sum(length * rows for length, rows in sizes)
    batch_cost = BATCH_COST * budget
    batches = []
    while len(pool):
        batches.append(pool.take(budget))
    if padded(parts) <= budget and padded(parts) <= real + 4 * batch_cost:
        cost = sum(padded(batch) + batch_cost for batch in batches)
        assert cost <= padded(parts) + batch_cost + 1e-6
