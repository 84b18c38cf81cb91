"""Select the sources whose sampled translation improved most over the greedy one.

It reads the prefiltered records twice. The first pass writes an entry of 42 bytes per source to the
disk; the best entries are selected in chunks. So memory depends on the number of requested sources,
not on the pool. The second pass writes the records in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from scorekit.errors import UserError
from scorekit.numeric import below, lowest_equal
from synth.config import SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.stage import GlobalStage, StageProgress, StageWork
from synth.reasons import Reason
from synth.record import RejectedRecord
from synth.stages.prefilter_score import improvement, improvements
from synth.storage.distributions import Distributions
from synth.storage.store import Record, ShardWriter, StageFolder

log = structlog.get_logger()

#: The sort entry of a source: by improvement; ties by id, equal in every run.
_ENTRY = [("improvement", "<f8"), ("source_id", "S32"), ("bucket", "<u2")]
#: Number of entries read or written at once.
_CHUNK = 1 << 16


class SelectSources(GlobalStage):
    """Selects the best `target_examples_total` of all prefiltered sources.

    A record gains `rank` (0: the most improved).
    """

    name = "select_sources"
    charts = (improvement("selected"),)

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the settings that the selection depends on."""
        threshold = cfg.prefilter.min_improvement
        return {
            "target_examples_total": cfg.data.target_examples_total,
            "rank_by": cfg.prefilter.rank_by,
            "shard_records": cfg.run.shard_records,
            **({} if threshold is None else {"min_improvement": threshold}),
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost: the chosen sources of the pool are accepted."""
        return Cost(
            self.name,
            records=run.pool,
            left_out=run.pool - run.chosen,
            disk_bytes=int(run.pool * run.scored_bytes),
            driver_s=(0.00005, 0.0),
        )

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return the distributions of the selected sources."""
        return improvements(records)

    def run(self, work: StageWork, manifest: dict[str, Any]) -> None:
        """Rank, choose, and write the chosen in the order of their sources."""
        if work.share.shard_id and not work.share.takes_all:
            raise UserError(f"--stage {self.name} sees all shards at once: run it without them")
        cfg, source, folder = work.cfg, self.input_of(work.out_dirs), work.folder
        missing = source.missing()
        if missing:
            raise UserError(f"{source.path}: shard {missing[0]} is not done. Resume that stage")
        folder.path.mkdir(parents=True, exist_ok=True)
        entries = folder.path / ".entries.tmp"
        try:
            write_entries(entries, islice(source.records(), work.limit))
            chosen = choose(entries, cfg)
        finally:
            entries.unlink(missing_ok=True)
        _report_selection(chosen, cfg, work.progress.print_line)
        ranked = _rank(islice(source.records(), work.limit), chosen.positions)
        threshold = cfg.prefilter.min_improvement
        per_shard = cfg.run.shard_records
        shards = max(1, -(-len(chosen.positions) // per_shard))
        for index in range(shards):
            max_chosen = None if index == shards - 1 else per_shard
            digest = source.manifest_digest()
            _write_shard(folder, index, ranked, max_chosen, threshold, digest, work.progress)
        folder.set_manifest({**manifest, "shards": shards})


def _report_selection(chosen: Chosen, cfg: SynthConfig, print_line: Callable[[str], None]) -> None:
    """Report the buckets' shares, and log how many sources sampling did not improve."""
    requested, count = cfg.data.target_examples_total, len(chosen.positions)
    name = SelectSources.name
    if chosen.refilled:
        short = ", ".join(
            f"{bucket} ({deficit:,} short)" for bucket, deficit in chosen.short.items()
        )
        print_line(
            f"{name}: too few sources for their share in bucket {short}: {chosen.refilled:,} of "
            "other buckets take their places"
        )
    if count < requested:
        threshold = cfg.prefilter.min_improvement
        condition = "" if threshold is None else f" with prefilter.min_improvement {threshold:g}"
        print_line(
            f"{name}: {count:,} sources are left{condition}: {requested - count:,} fewer than "
            "data.target_examples_total, and no bucket has more"
        )
    weak = chosen.improvements[chosen.improvements <= 0]
    if len(weak):
        log.warning("no_improvement", stage=name, sources=len(weak), worst=float(weak.min()))


def _write_shard(
    folder: StageFolder,
    index: int,
    ranked: Iterator[tuple[Record, int | None]],
    max_chosen: int | None,
    threshold: float | None,
    input_digest: str | None,
    progress: StageProgress,
) -> None:
    """Write records until `max_chosen` of them are chosen (None: all), and the mark.

    threshold: least improvement of a chosen one.
    """
    stats = progress.stats
    codes: dict[str, int] = {}
    noted: Counter[str] = Counter()
    with (
        ShardWriter(folder.shard(index)) as accepted,
        ShardWriter(folder.rejected(index)) as rejected,
    ):
        while max_chosen is None or accepted.records < max_chosen:
            record, rank = next(ranked, (None, None))
            if record is None:
                break
            if rank is not None:
                accepted.write({**record, "rank": rank})
                if record["prefilter"]["improvement"] <= 0:
                    noted[Reason.NO_IMPROVEMENT] += 1
            else:
                rejection = _not_chosen(record, threshold)
                rejected.write(rejection.as_record(folder.name))
                codes[rejection.reason_code] = codes.get(rejection.reason_code, 0) + 1
            stats.records_in += 1
            progress.advance(1, None)
        stats.records_out += accepted.records
        stats.rejected.update(codes)
        mark = {
            "records": accepted.records,
            "rejected": dict(sorted(codes.items())),
            "told": dict(noted),
            "input": input_digest,
            "rejected_digest": rejected.commit(),
            "digest": accepted.commit(),
        }
    folder.set_mark(index, mark)


def _not_chosen(record: Record, threshold: float | None) -> RejectedRecord:
    improvement = record["prefilter"]["improvement"]
    if threshold is not None and below(improvement, threshold):
        return RejectedRecord(
            record, Reason.BELOW_MIN_IMPROVEMENT, f"{improvement:.3f}, under {threshold:g}"
        )
    return RejectedRecord(record, Reason.NOT_SELECTED)


def _rank(records: Iterator[Record], chosen: np.ndarray) -> Iterator[tuple[Record, int | None]]:
    """Yield records with their rank, None if not chosen.

    chosen: from `choose`.
    """
    in_order = np.argsort(chosen)
    index = 0
    for position, record in enumerate(records):
        if index < len(chosen) and chosen[in_order[index]] == position:
            yield record, int(in_order[index])
            index += 1
        else:
            yield record, None


def write_entries(path: Path, records: Iterator[Record]) -> None:
    """Write the sort entry of each record in the format of _ENTRY."""
    with path.open("wb") as file:
        while chunk := [
            (r["prefilter"]["improvement"], r["source_id"], r["length_bucket_id"])
            for r in islice(records, _CHUNK)
        ]:
            file.write(np.array(chunk, dtype=_ENTRY).tobytes())


class Chosen(NamedTuple):
    """The selected sources.

    positions: indexes of their entries, the most improved first.
    improvements: theirs.
    short: bucket -> number of sources missing for its share.
    refilled: sources from other buckets in their place."""

    positions: np.ndarray
    improvements: np.ndarray
    short: dict[int, int]
    refilled: int


def choose(path: Path, cfg: SynthConfig) -> Chosen:
    """Select the best entries.

    rank_by bucket: each bucket with sources has an equal share; what it cannot fill goes to the
    most improved sources of other buckets.
    """
    requested, threshold = cfg.data.target_examples_total, cfg.prefilter.min_improvement
    by_bucket = cfg.prefilter.rank_by == "bucket"
    counts: Counter[int] = Counter()
    for rows in _rows(path, threshold, by_bucket):
        counts.update(rows["bucket"].tolist())
    tops = {
        bucket: _Best(requested // len(counts) + (index < requested % len(counts)))
        for index, bucket in enumerate(sorted(counts))
    }
    for rows in _rows(path, threshold, by_bucket):
        for bucket, best in tops.items():
            best.offer(rows[rows["bucket"] == bucket])
    rows_by_bucket = {bucket: best.rows() for bucket, best in tops.items()}
    deficits = {bucket: best.count - len(rows_by_bucket[bucket]) for bucket, best in tops.items()}
    chosen = np.concatenate([_no_rows(), *rows_by_bucket.values()])
    taken_positions = np.sort(chosen["position"])
    if len(taken_positions) < min(requested, counts.total()):
        spare = _Best(requested - len(taken_positions))
        for rows in _rows(path, threshold, by_bucket):
            insert_index = np.searchsorted(taken_positions, rows["position"]).clip(
                max=len(taken_positions) - 1
            )
            spare.offer(rows[taken_positions[insert_index] != rows["position"]])
        chosen = np.concatenate([chosen, spare.rows()])
    rows = chosen[_order(chosen)]
    short = {bucket: count for bucket, count in deficits.items() if count and by_bucket}
    return Chosen(rows["position"], rows["improvement"], short, len(chosen) - len(taken_positions))


class _Best:
    """Keeps the `count` most improved rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._batches = [_no_rows()]
        self._size = 0

    def offer(self, rows: np.ndarray) -> None:
        self._batches.append(rows)
        self._size += len(rows)
        if self._size > 2 * self.count + _CHUNK:
            self._batches = [self.rows()]
            self._size = len(self._batches[0])

    def rows(self) -> np.ndarray:
        candidates = np.concatenate(self._batches)
        return candidates[_order(candidates)[: self.count]]


def _order(rows: np.ndarray) -> np.ndarray:
    return np.lexsort((rows["source_id"], -rows["improvement"]))


def _no_rows() -> np.ndarray:
    return np.empty(0, dtype=[*_ENTRY, ("position", "<i8")])


def _rows(path: Path, threshold: float | None, by_bucket: bool) -> Iterator[np.ndarray]:
    """Yield the eligible entries with their positions, in chunks.

    by_bucket: keep their buckets; else all are in one.
    """
    start = 0
    with path.open("rb") as file:
        while len(chunk := np.fromfile(file, dtype=_ENTRY, count=_CHUNK)):
            rows = np.empty(len(chunk), dtype=_no_rows().dtype)
            for name in chunk.dtype.names or ():
                rows[name] = chunk[name]
            rows["position"] = np.arange(start, start + len(chunk))
            if not by_bucket:
                rows["bucket"] = 0
            start += len(chunk)
            yield (
                rows if threshold is None else rows[rows["improvement"] >= lowest_equal(threshold)]
            )
