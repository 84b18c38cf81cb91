"""Check quotas, refills and that samples do not depend on order or partition."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.config import BlobConfig, BucketingConfig
from synth.record import source_id
from synth.sources import sampling
from synth.sources.sampling import (
    BottomK,
    apportion,
    bucket_of,
    divide,
    fill,
    plan_quotas,
    prioritise,
)
from tests.kits.examples import examples

EDGES = [0, 10, 20, 40]


def quotas(quota="auto", ratio=0.0, pool=30, enabled=True):
    bucketing = BucketingConfig(boundaries=EDGES, per_bucket_quota=quota)
    return plan_quotas(bucketing, BlobConfig(enabled=enabled, blob_ratio=ratio), pool)


def test_auto_gives_every_bucket_an_equal_share_and_blobs_their_ratio():
    assert quotas() == [10, 10, 10, None, None, None]
    assert quotas(ratio=0.5) == [5] * 6
    assert quotas(ratio=0.25, pool=40) == [10, 10, 10, 4, 3, 3]
    assert quotas(ratio=1.0) == [None] * 3 + [10] * 3
    assert quotas(ratio=0.5, enabled=False) == quotas()


def test_numbers_are_quotas_up_to_the_pool():
    assert quotas(4) == [4, 4, 4, None, None, None]
    assert quotas([6, 0, 3]) == [6, None, 3, None, None, None]
    assert quotas([6, 0, 3], ratio=1 / 3) == [4, None, 2, 2, None, 1]
    assert quotas([60, 30, 30], pool=12) == [6, 3, 3, None, None, None]
    assert quotas(50) == quotas()


def test_a_lower_edge_belongs_to_its_bucket():
    assert [bucket_of(x, EDGES) for x in (0, 9.99, 10, 39.9, 40, -1)] == [0, 0, 1, 2, None, None]


def test_buckets_that_have_enough_give_their_quota():
    assert fill([5, 5, 5, 5], [9, 5, 100, 6]) == [5, 5, 5, 5]


def test_what_a_bucket_lacks_comes_from_the_others_of_its_type():
    assert fill([6, 6, 6, 6], [2, 20, 9, 9]) == [2, 10, 6, 6]
    four_each = [4] * 8
    assert fill(four_each, [1, 4, 9, 9, 9, 9, 9, 9]) == [1, 4, 6, 5, 4, 4, 4, 4]
    assert fill(four_each, [1, 0, 5, 9, 9, 9, 9, 9]) == [1, 0, 5, 9, 5, 4, 4, 4]


def test_a_type_that_has_too_few_is_refilled_by_the_other():
    assert fill([5, 5, 5, 5], [20, 20, 1, 2]) == [9, 8, 1, 2]
    assert fill([5, 5, None, None], [3, 4, 90, 90]) == [3, 4, 0, 0]


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 100))
def test_shares_sum_up_and_follow_their_weights(weights, total):
    counts = apportion(weights, total)
    if sum(weights):
        assert sum(counts) == total
        exact = [total * weight / sum(weights) for weight in weights]
        assert all(abs(c - share) < 1 for c, share in zip(counts, exact, strict=True))
    else:
        assert not any(counts)


some_quotas = st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=3, max_size=3).flatmap(
    lambda first: st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=3, max_size=3).map(
        lambda second: first + second
    )
)


@given(some_quotas, st.lists(st.integers(0, 60), min_size=6, max_size=6))
def test_quotas_are_filled_and_what_is_lacking_is_refilled(quotas, supply):
    counts = fill(quotas, supply)
    able = [0 if q is None else n for q, n in zip(quotas, supply, strict=True)]
    assert sum(counts) == min(sum(q or 0 for q in quotas), sum(able))
    for quota, available, count in zip(quotas, able, counts, strict=True):
        assert min(quota or 0, available) <= count <= available


@settings(max_examples=examples(100))
@given(some_quotas, st.lists(st.tuples(*[st.integers(0, 12)] * 3), min_size=3, max_size=3))
def test_texts_that_are_both_a_sentence_and_a_blob_are_given_once(quotas, bucket_texts):
    """Each bucket has texts that are only a sentence, only a blob, and both."""
    supply = [only + both for only, _, both in bucket_texts]
    supply += [only + both for _, only, both in bucket_texts]
    usable = [0 if q is None else n for q, n in zip(quotas, supply, strict=True)]
    distinct = [
        min(sum(texts), usable[bucket] + usable[bucket + 3])
        for bucket, texts in enumerate(bucket_texts)
    ]
    counts = fill(quotas, supply, distinct)
    assert all(count <= have for count, have in zip(counts, usable, strict=True))
    assert all(counts[i] + counts[i + 3] <= distinct[i] for i in range(3))
    requested_counts = [sum(q or 0 for q in quotas[:3]), sum(q or 0 for q in quotas[3:])]
    assert sum(counts) == min(sum(requested_counts), sum(distinct))
    if (
        sum(usable[:3]) >= requested_counts[0]
        and sum(usable[3:]) >= requested_counts[1]
        and sum(distinct) >= sum(requested_counts)
    ):  # by the theorem of Hall, both types can give their full number
        assert [sum(counts[:3]), sum(counts[3:])] == requested_counts


def test_a_text_that_is_both_is_a_sentence_unless_blobs_are_lacking():
    both = np.arange(10, dtype=np.uint64)
    more = np.arange(20, 30, dtype=np.uint64)
    first, second = divide(both, np.concatenate([both, more]), 4, 8)
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [4, 5, 6, 7, 8, 9, 20, 21]
    first, second = divide(np.concatenate([both, more]), both, 8, 4)
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 20, 21] and second.tolist() == [6, 7, 8, 9]


# -- the sample ----------------------------------------------------


def simple_sample(quotas, items):
    """Return the sample that BottomK should give, by sorting everything."""
    half = len(quotas) // 2
    priorities = [
        np.unique(np.array([p for s, p in items if s == stratum and quotas[s] is not None], "u8"))
        for stratum in range(len(quotas))
    ]
    distinct = [len({*priorities[i].tolist(), *priorities[i + half].tolist()}) for i in range(half)]
    counts = fill(quotas, [len(d) for d in priorities], distinct)
    pairs = [
        divide(priorities[i], priorities[i + half], counts[i], counts[i + half])
        for i in range(half)
    ]
    return [chosen.tolist() for kind in zip(*pairs, strict=True) for chosen in kind]


def sample(quotas, items):
    """Return (the retained items, the sample)."""
    bottom = BottomK(quotas)
    let = [(s, p) for s, p in items if bottom.offer(s, p)]
    chosen = [priorities.tolist() for priorities in bottom.finish()]
    for stratum, priorities in enumerate(chosen):  # their texts have been written
        assert {*priorities} <= {p for s, p in let if s == stratum}
    return let, chosen


some_item = st.tuples(st.integers(0, 5), st.integers(0, 400))
#: Few priorities, so that many texts are both a sentence and a blob; or nearly none is.
some_items = st.one_of(
    st.lists(some_item, max_size=300),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=300),
)


@pytest.fixture(autouse=True)
def small_slack(monkeypatch):
    """Lower the slack, so that samples are pruned while items arrive."""
    monkeypatch.setattr(sampling, "_SLACK", 5)


@settings(max_examples=examples(60))
@given(some_quotas, some_items)
def test_the_sample_is_the_smallest_of_each_bucket_with_refill(quotas, items):
    assert sample(quotas, items)[1] == simple_sample(quotas, items)


@given(some_quotas, some_items, st.randoms(use_true_random=False))
def test_the_sample_does_not_depend_on_the_order(quotas, items, rng):
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert sample(quotas, shuffled)[1] == sample(quotas, items)[1]


@given(some_quotas, st.lists(st.tuples(some_item, st.integers(0, 3)), max_size=300))
def test_parts_merge_into_the_sample_of_the_whole(quotas, placed):
    items = [item for item, _ in placed]
    parts = [[item for item, part in placed if part == k] for k in range(4)]
    samples = [sample(quotas, part)[0] for part in parts]
    merged = BottomK(quotas)
    for part in samples:
        for stratum in range(6):
            positions = np.array([p for s, p in part if s == stratum], dtype=np.uint64)
            merged.extend(stratum, positions)
    assert [chosen.tolist() for chosen in merged.finish()] == simple_sample(quotas, items)


def test_equal_texts_are_taken_once():
    priority = prioritise(7)
    texts = ["사람은  자유롭다.", "사람은 자유롭다.\n", "다른 글"]
    items = [(0, priority(source_id(text))) for text in texts * 50]
    assert next(len(chosen) for chosen in sample([10, 0, 0, None, None, None], items)[1]) == 2


def test_a_seed_gives_another_order():
    ids = [source_id(str(i)) for i in range(50)]
    orders = [sorted(ids, key=prioritise(seed)) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


def test_every_text_has_the_same_chance():
    chosen = [0] * 40
    for seed in range(500):
        priority = prioritise(seed)
        items = {priority(source_id(str(i))): i for i in range(40)}
        for position in sample([10, None], [(0, p) for p in items])[1][0]:
            chosen[items[position]] += 1
    assert sum(chosen) == 5000
    assert all(125 - 60 < count < 125 + 60 for count in chosen)  # 6 standard deviations


def test_what_is_held_follows_the_pool_and_not_what_is_offered():
    rng = random.Random(3)
    bottom = BottomK([100] * 6)
    max_count = 0
    for _ in range(50_000):
        bottom.offer(rng.choice([0, 1, 1, 2, 4]), rng.getrandbits(64))
        max_count = max(max_count, bottom._count)
    assert max_count < 10 * 600
