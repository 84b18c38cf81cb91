"""The sources whose sampled translation improved most on the greedy one.

Two passes over what was prefiltered. The first writes an entry of 42 bytes a source to the disk;
among the entries the best are looked for some at a time. So memory follows the sources that are
wanted, whatever the pool. The second writes the records in the order in which they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from scorekit.errors import UserError
from scorekit.numeric.thresholds import below, lowest_equal
from synth.config import SynthConfig
from synth.context import Context
from synth.drive.kinds import WholeStage
from synth.folder.distributions import Found
from synth.folder.store import Record, ShardWriter, StageFolder
from synth.record import Rejected
from synth.stages.cost import Cost, Sizes
from synth.stages.prefilter_score import improvement, improvements

if TYPE_CHECKING:
    import numpy as np

log = structlog.get_logger()

#: What is sorted of a source: by improvement; of equal ones the id decides, in every run alike.
_ENTRY = [("improvement", "<f8"), ("source_id", "S32"), ("bucket", "<u2")]
#: Entries that are read or written at once.
_CHUNK = 1 << 16


class SelectSources(WholeStage):
    """The best `target_examples_total` of all prefiltered sources.

    A record gains `rank` (0: the most improved).
    """

    name = "select_sources"
    drawn = (improvement("selected"),)

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the choice depends on."""
        least = cfg.prefilter.min_improvement
        return {
            "target_examples_total": cfg.data.target_examples_total,
            "rank_by": cfg.prefilter.rank_by,
            "shard_records": cfg.run.shard_records,
            **({} if least is None else {"min_improvement": least}),
        }

    def cost(self, run: Sizes) -> Cost:
        """Of the pool those that are chosen go on."""
        return Cost(
            self.name,
            records=run.pool,
            left_out=run.pool - run.chosen,
            disk_bytes=int(run.pool * run.scored_bytes),
            driver_s=(0.00005, 0.0),
        )

    def figures(self, cfg: SynthConfig, records: Iterable[Record]) -> Found:
        """As before the choice."""
        return improvements(records)

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None:
        """Rank, choose, and write the chosen in the order of their sources."""
        if ctx.shard_id and not ctx.share:
            raise UserError(f"--stage {self.name} sees all shards at once: run it without them")
        source = ctx.input_of(self)
        missing = source.missing()
        if missing:
            raise UserError(f"{source.path}: shard {missing[0]} is not done; resume that stage")
        folder = ctx.folder(self.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        entries = folder.path / ".entries.tmp"
        try:
            write_entries(entries, _records(ctx, source))
            chosen = choose(entries, ctx.cfg)
        finally:
            entries.unlink(missing_ok=True)
        _tell(chosen, ctx)
        ranked = _ranked(_records(ctx, source), chosen.positions)
        per_shard = ctx.cfg.run.shard_records
        shards = max(1, -(-len(chosen.positions) // per_shard))
        for index in range(shards):
            room = None if index == shards - 1 else per_shard
            _write_shard(ctx, folder, index, ranked, room, source.manifest_digest())
        folder.set_manifest({**manifest, "shards": shards})


def _tell(chosen: Chosen, ctx: Context) -> None:
    """Say what became of the shares, and log how many sources sampling did not improve."""
    wanted, count = ctx.cfg.data.target_examples_total, len(chosen.positions)
    name = SelectSources.name
    if chosen.refilled:
        short = ", ".join(f"{bucket} ({lacks:,} short)" for bucket, lacks in chosen.short.items())
        ctx.tell(
            f"{name}: too few sources for their share in bucket {short}: {chosen.refilled:,} of "
            "other buckets take their places"
        )
    if count < wanted:
        least = ctx.cfg.prefilter.min_improvement
        why = "" if least is None else f" with prefilter.min_improvement {least:g}"
        ctx.tell(
            f"{name}: {count:,} sources are left{why}: {wanted - count:,} fewer than "
            "data.target_examples_total, and no bucket has more"
        )
    weak = chosen.improvements[chosen.improvements <= 0]
    if len(weak):
        log.warning("no_improvement", stage=name, sources=len(weak), worst=float(weak.min()))


def _write_shard(
    ctx: Context,
    folder: StageFolder,
    index: int,
    ranked: Iterator[tuple[Record, int | None]],
    room: int | None,
    input_digest: str | None,
) -> None:
    """Write records until `room` of them are chosen (None: all), and the mark."""
    least = ctx.cfg.prefilter.min_improvement
    codes: dict[str, int] = {}
    noted: Counter[str] = Counter()
    with (
        ShardWriter(folder.shard(index)) as kept,
        ShardWriter(folder.rejected(index)) as rejected,
    ):
        while room is None or kept.records < room:
            record, rank = next(ranked, (None, None))
            if record is None:
                break
            if rank is not None:
                kept.write({**record, "rank": rank})
                if record["prefilter"]["improvement"] <= 0:
                    noted["no_improvement"] += 1
            else:
                lost = _not_chosen(record, least)
                rejected.write(lost.as_record(folder.name))
                codes[lost.reason_code] = codes.get(lost.reason_code, 0) + 1
            ctx.stats.records_in += 1
            ctx.advance(1, None)
        ctx.stats.records_out += kept.records
        ctx.stats.rejected.update(codes)
        mark = {
            "records": kept.records,
            "rejected": dict(sorted(codes.items())),
            "told": dict(noted),
            "input": input_digest,
            "rejected_digest": rejected.commit(),
            "digest": kept.commit(),
        }
    folder.set_mark(index, mark)


def _not_chosen(record: Record, least: float | None) -> Rejected:
    improvement = record["prefilter"]["improvement"]
    if least is not None and below(improvement, least):
        return Rejected(record, "below_min_improvement", f"{improvement:.3f}, under {least:g}")
    return Rejected(record, "not_selected")


def _records(ctx: Context, source: StageFolder) -> Iterator[Record]:
    """The records of the stage before, up to ctx.limit."""
    return islice(source.records(), ctx.limit)


def _ranked(records: Iterator[Record], chosen: np.ndarray) -> Iterator[tuple[Record, int | None]]:
    """Records with their rank, None for those that are not chosen. chosen: of `choose`."""
    import numpy as np

    in_order = np.argsort(chosen)
    at = 0
    for position, record in enumerate(records):
        if at < len(chosen) and chosen[in_order[at]] == position:
            yield record, int(in_order[at])
            at += 1
        else:
            yield record, None


def write_entries(path: Path, records: Iterator[Record]) -> None:
    """What is sorted of each record, one after the other, as _ENTRY says."""
    import numpy as np

    with path.open("wb") as file:
        while found := [
            (r["prefilter"]["improvement"], r["source_id"], r["length_bucket_id"])
            for r in islice(records, _CHUNK)
        ]:
            file.write(np.array(found, dtype=_ENTRY).tobytes())


class Chosen(NamedTuple):
    """positions: of the chosen among the entries, the most improved first; improvements: theirs.
    short: bucket -> sources that it lacks for its share. refilled: sources that other buckets gave
    in their place."""

    positions: np.ndarray
    improvements: np.ndarray
    short: dict[int, int]
    refilled: int


def choose(path: Path, cfg: SynthConfig) -> Chosen:
    """Choose among the entries.

    rank_by bucket: an equal share for each bucket that has sources; what a bucket cannot fill goes
    to the most improved of the others.
    """
    import numpy as np

    wanted, least = cfg.data.target_examples_total, cfg.prefilter.min_improvement
    apart = cfg.prefilter.rank_by == "bucket"
    counts: Counter[int] = Counter()
    for rows in _rows(path, least, apart):
        counts.update(rows["bucket"].tolist())
    tops = {
        bucket: _Best(wanted // len(counts) + (place < wanted % len(counts)))
        for place, bucket in enumerate(sorted(counts))
    }
    for rows in _rows(path, least, apart):
        for bucket, best in tops.items():
            best.offer(rows[rows["bucket"] == bucket])
    found = {bucket: best.rows() for bucket, best in tops.items()}
    lacks = {bucket: best.count - len(found[bucket]) for bucket, best in tops.items()}
    chosen = np.concatenate([_no_rows(), *found.values()])
    taken = np.sort(chosen["position"])
    if len(taken) < min(wanted, counts.total()):
        spare = _Best(wanted - len(taken))
        for rows in _rows(path, least, apart):
            at = np.searchsorted(taken, rows["position"]).clip(max=len(taken) - 1)
            spare.offer(rows[taken[at] != rows["position"]])
        chosen = np.concatenate([chosen, spare.rows()])
    rows = chosen[_order(chosen)]
    short = {bucket: count for bucket, count in lacks.items() if count and apart}
    return Chosen(rows["position"], rows["improvement"], short, len(chosen) - len(taken))


class _Best:
    """The most improved of all rows that were offered, `count` at most."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held = [_no_rows()]
        self._size = 0

    def offer(self, rows: np.ndarray) -> None:
        self._held.append(rows)
        self._size += len(rows)
        if self._size > 2 * self.count + _CHUNK:
            self._held = [self.rows()]
            self._size = len(self._held[0])

    def rows(self) -> np.ndarray:
        import numpy as np

        held = np.concatenate(self._held)
        return held[_order(held)[: self.count]]


def _order(rows: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.lexsort((rows["source_id"], -rows["improvement"]))


def _no_rows() -> np.ndarray:
    import numpy as np

    return np.empty(0, dtype=[*_ENTRY, ("position", "<i8")])


def _rows(path: Path, least: float | None, apart: bool) -> Iterator[np.ndarray]:
    """The entries that may be chosen, with their positions, some at a time.

    apart: by their buckets; else all are of one.
    """
    import numpy as np

    start = 0
    with path.open("rb") as file:
        while len(found := np.fromfile(file, dtype=_ENTRY, count=_CHUNK)):
            rows = np.empty(len(found), dtype=_no_rows().dtype)
            for name in found.dtype.names or ():
                rows[name] = found[name]
            rows["position"] = np.arange(start, start + len(found))
            if not apart:
                rows["bucket"] = 0
            start += len(found)
            yield rows if least is None else rows[rows["improvement"] >= lowest_equal(least)]
