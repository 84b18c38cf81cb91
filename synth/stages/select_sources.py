"""The sources whose sampled translation improved most on the greedy one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any, NamedTuple

from scorekit.errors import UserError
from synth.config import SynthConfig
from synth.context import Context
from synth.record import Rejected
from synth.store import ShardWriter


class _Entry(NamedTuple):
    """Sorts by improvement; of equal ones the source's id decides, in every run alike."""

    improvement: float
    source_id: str
    bucket: int


class SelectSources:
    """The best `target_examples_total` of all prefiltered sources."""

    name = "select_sources"
    after = "prefilter_score"

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the choice depends on."""
        return {
            "target_examples_total": cfg.data.target_examples_total,
            "rank_by": cfg.prefilter.rank_by,
            "shard_records": cfg.run.shard_records,
        }

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None:
        """Rank, choose, and write the chosen in the order of their sources."""
        if ctx.shard_id and not ctx.share:
            raise UserError(f"--stage {self.name} sees all shards at once: run it without them")
        source = ctx.input_of(self)
        missing = source.missing()
        if missing:
            raise UserError(f"{source.path}: shard {missing[0]} is not done; resume that stage")
        ranks = choose(_entries(ctx, source), ctx.cfg)
        folder = ctx.folder(self.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        per_shard = ctx.cfg.run.shard_records
        shards = max(1, -(-len(ranks) // per_shard))
        records = enumerate_limited(ctx, source)
        done = False
        for index in range(shards):
            with (
                ShardWriter(folder.shard(index)) as kept,
                ShardWriter(folder.rejected(index)) as rejected,
            ):
                while not done and (kept.records < per_shard or index == shards - 1):
                    record = next(records, None)
                    if record is None:
                        done = True
                    elif record["source_id"] in ranks:
                        kept.write({**record, "rank": ranks[record["source_id"]]})
                        ctx.stats.records_out += 1
                    else:
                        rejected.write(Rejected(record, "not_selected").as_record(self.name))
                        ctx.stats.rejected["not_selected"] += 1
                    ctx.stats.records_in += record is not None
                    ctx.advance(record is not None, None)
                mark = {
                    "records": kept.records,
                    "rejected": {"not_selected": rejected.records} if rejected.records else {},
                    "input": source.manifest_digest(),
                    "rejected_digest": rejected.commit(),
                    "digest": kept.commit(),
                }
            folder.set_mark(index, mark)
        folder.set_manifest({**manifest, "shards": shards})


def enumerate_limited(ctx: Context, source: Any) -> Any:
    """The records of the stage before, up to ctx.limit."""
    from itertools import islice

    return islice(source.records(), ctx.limit)


def _entries(ctx: Context, source: Any) -> list[_Entry]:
    return [
        _Entry(r["prefilter"]["improvement"], r["source_id"], r["length_bucket_id"])
        for r in enumerate_limited(ctx, source)
    ]


def choose(entries: list[_Entry], cfg: SynthConfig) -> dict[str, int]:
    """source_id -> rank (0: the most improved) of the chosen.

    rank_by bucket: an equal share for each bucket that has sources; what a bucket cannot fill goes
    to the most improved of the others.
    """
    wanted = cfg.data.target_examples_total
    if cfg.prefilter.rank_by == "overall":
        chosen = heapq.nsmallest(wanted, entries, key=_order)
    else:
        chosen = _by_bucket(entries, wanted)
    return {entry.source_id: rank for rank, entry in enumerate(sorted(chosen, key=_order))}


def _by_bucket(entries: list[_Entry], wanted: int) -> list[_Entry]:
    buckets: dict[int, list[_Entry]] = defaultdict(list)
    for entry in entries:
        buckets[entry.bucket].append(entry)
    chosen: list[_Entry] = []
    spare: list[_Entry] = []
    for position, bucket in enumerate(sorted(buckets)):
        share = wanted // len(buckets) + (position < wanted % len(buckets))
        ranked = sorted(buckets[bucket], key=_order)
        chosen += ranked[:share]
        spare += ranked[share:]
    return chosen + heapq.nsmallest(wanted - len(chosen), spare, key=_order)


def _order(entry: _Entry) -> tuple[float, str]:
    return -entry.improvement, entry.source_id
