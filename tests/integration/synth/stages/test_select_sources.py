"""Check that select_sources equals a full sort, in memory proportional to the target."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synth.config import SynthConfig
from synth.stages import select_sources
from synth.stages.select_sources import choose, write_entries


def config(total, rank_by="bucket", min_improvement=None):
    return SynthConfig.model_validate(
        {
            "run": {"out_dir": "unused"},
            "data": {"src_lang": "ko", "tgt_lang": "en", "target_examples_total": total},
            "prefilter": {"rank_by": rank_by, "min_improvement": min_improvement},
        }
    )


def record(number, improvement, bucket):
    return {
        "source_id": f"{number * 7919 % 10007:032x}",
        "length_bucket_id": bucket,
        "prefilter": {"improvement": improvement},
    }


def chosen(tmp_path, records, cfg):
    path = tmp_path / "entries"
    write_entries(path, iter(records))
    return choose(path, cfg).positions.tolist()


def order(row):
    return -row["prefilter"]["improvement"], row["source_id"]


def by_sorting(records, cfg):
    """Return the choice that `choose` should give, by sorting everything."""
    min_improvement = cfg.prefilter.min_improvement
    able = [
        r
        for r in records
        if min_improvement is None or r["prefilter"]["improvement"] >= min_improvement
    ]
    total = cfg.data.target_examples_total
    ranked = sorted(able, key=order)
    if cfg.prefilter.rank_by == "bucket":
        buckets = sorted({r["length_bucket_id"] for r in able})
        best, spare = [], []
        for index, bucket in enumerate(buckets):
            share = total // len(buckets) + (index < total % len(buckets))
            in_bucket = [r for r in ranked if r["length_bucket_id"] == bucket]
            best += in_bucket[:share]
            spare += in_bucket[share:]
        ranked = sorted(best + sorted(spare, key=order)[: total - len(best)], key=order)
    return [records.index(r) for r in ranked[:total]]


def test_an_improvement_on_the_border_is_chosen(tmp_path):
    """Check float rounding: 3.4 - 3.1 is 0.2999999999999998."""
    records = [record(n, x, 0) for n, x in enumerate([3.4 - 3.1, 0.1 + 0.2, 0.2999, 0.3])]
    assert sorted(chosen(tmp_path, records, config(9, min_improvement=0.3))) == [0, 1, 3]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Lower the chunk size, so that retained rows are pruned while rows arrive."""
    monkeypatch.setattr(select_sources, "_CHUNK", 7)


@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, 3.25]), st.integers(0, 4)),
        max_size=80,
    ),
    st.integers(1, 40),
    st.sampled_from(["bucket", "overall"]),
    st.sampled_from([None, 0.0, 0.75]),
)
def test_the_choice_is_that_of_sorting_everything(
    tmp_path_factory, rows, total, rank_by, min_improvement
):
    records = [record(i, *row) for i, row in enumerate(rows)]
    cfg = config(total, rank_by, min_improvement)
    folder = tmp_path_factory.getbasetemp()
    assert chosen(folder, records, cfg) == by_sorting(records, cfg)


def test_nothing_to_choose_from_is_no_error(tmp_path):
    assert chosen(tmp_path, [], config(3)) == []
    assert chosen(tmp_path, [record(0, 1.0, 0)], config(3, min_improvement=2.0)) == []


def test_memory_follows_what_is_wanted_and_not_the_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(select_sources, "_CHUNK", 1000)
    cfg = config(100)

    def peak(pool):
        path = tmp_path / str(pool)
        records = (record(i, i * 31 % 1009 / 100, i % 9) for i in range(pool))
        tracemalloc.start()
        write_entries(path, records)
        choose(path, cfg)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak_bytes

    peak(2000)  # numpy is loaded
    assert peak(60_000) < 1.2 * peak(15_000)
