"""sample_sources: sample `sample_pool_size` sources from the corpus, in any reading order.

Each corpus file gives a part; the process that completes the last part merges them. With
--num-shards 4 a process reads every fourth file. Complete parts are not made again.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.locks import RETRY_S, hold_locks, release
from synth.config import DataConfig, SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.stage import GlobalStage, StageWork
from synth.execution.stage_start import check_begun
from synth.reasons import Reason
from synth.record import RejectedRecord
from synth.sources.ingest import Ingest, record_columns
from synth.sources.madlad import REVISION, SourceFile, madlad_id, source_files
from synth.sources.parts import (
    Part,
    PartCounts,
    PartReaders,
    choose,
    first_broken,
    no_source_reason,
    offer_part,
    unread,
)
from synth.sources.sampling import TYPES, BottomK, plan_quotas
from synth.sources.screen import SCREENED, is_screened, screen, screen_settings
from synth.storage.distributions import Distribution, DistributionChart, Distributions, stratum
from synth.storage.parquet import ParquetFile
from synth.storage.shares import WorkClaims
from synth.storage.store import Record, ShardWriter, to_line

log = structlog.get_logger()

#: Number of files, and of documents per requested source, that are read under a limit.
_LIMIT_FILES, _LIMIT_DOCUMENTS = 4, 100
#: The pool as Parquet, in the folder of the run.
_VIEW = "sampled_sources.parquet"


class SampleSources(GlobalStage):
    """The first stage. Its output depends only on config, seed and corpus.

    A record has `source_id`, `source_text`, `source_type` ("sentence" | "blob"), `length`,
    `length_bucket_id`, `source_meta` {madlad: {...}}.
    """

    name = "sample_sources"
    outputs = (_VIEW,)
    runs_alone = False
    charts = (
        DistributionChart("Source length of the pool", "source_tokens", "tokens, nearly", "tokens"),
    )

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the part of the config that the sample depends on."""
        data = cfg.data.model_dump(
            mode="json",
            exclude={
                "src_lang",
                "tgt_lang",
                "languages",
                "pairs",
                "max_unreadable",
                "target_examples_total",
                "near_duplicates",
                "decontaminate",
            },
        )
        return {
            "data": {
                **data,
                "src_lang": madlad_id(cfg.data.src_lang),
                "madlad_revision": cfg.data.madlad_revision or REVISION,
                **screen_settings(cfg.data),
            },
            "segmentation": cfg.segmentation.model_dump(mode="json"),
            "bucketing": cfg.bucketing.model_dump(mode="json"),
            "blob": cfg.final_generation.blob.model_dump(mode="json"),
            "run": {"seed": cfg.run.seed, "shard_records": cfg.run.shard_records},
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of the pool and its view; no service is called."""
        return Cost(
            self.name,
            records=run.pool,
            disk_bytes=int(2 * run.pool * run.sampled_bytes),
            driver_s=(0.00012, 0.0),
        )

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return lengths, buckets and types of the pool."""
        chars, tokens = Distribution(), Distribution()
        buckets: Counter[str] = Counter()
        types: Counter[str] = Counter()
        strata: Counter[str] = Counter()
        edges = cfg.bucketing.boundaries
        for record in records:
            chars.add(len(record["source_text"]))
            tokens.add(record["length"])
            first = record["length_bucket_id"]
            buckets[f"{first}: from {edges[first]:g}"] += 1
            types[record["source_type"]] += 1
            strata[stratum(record)] += 1
        return {
            "source_chars": chars,
            "source_tokens": tokens,
            "buckets": buckets,
            "source_types": types,
            "strata": strata,
        }

    def run(self, work: StageWork, manifest: dict[str, Any]) -> None:
        """Read this process's files; merge when all files are read. Raises UserError."""
        folder = work.folder
        if folder.shards() is None:
            sampling = _Sampling(work, manifest)
            with hold_locks([(folder.lock(), True)], "sample there"):
                sampling.run()
        elif missing := folder.missing():
            raise UserError(
                f"{folder.path}: the mark of shard {missing[0]} is missing. Repair it with "
                f"`run --stage {self.name} --repair {missing[0]}`"
            )
        else:  # a merge that was killed while it cleaned up
            shutil.rmtree(folder.path / "parts", ignore_errors=True)


class _Sampling:
    """A run of the stage."""

    def __init__(self, work: StageWork, manifest: dict[str, Any]) -> None:
        self.cfg, self.folder, self.manifest = work.cfg, work.folder, manifest
        self.share, self.progress = work.share, work.progress
        self.data, self.pool = _within_limit(self.cfg.data, work.limit)
        self.quotas = plan_quotas(self.cfg.bucketing, self.cfg.final_generation.blob, self.pool)
        self.files = source_files(self.data)
        self.parts = [Part(self.folder.path / "parts", file.index) for file in self.files]

    def run(self) -> None:
        (self.folder.path / "parts").mkdir(parents=True, exist_ok=True)
        with self._alone():
            check_begun(self.folder, None, self.manifest)
            if self.folder.manifest() is None:
                self.folder.set_manifest(self.manifest)
        if outdated := sum(part.is_outdated() for part in self.parts):
            message = "files are read again, which an earlier version has read"
            log.warning(message, stage=self.folder.name, files=outdated)
            self.progress.print_line(f"{self.folder.name}: {outdated:,} {message}")
        self._read()
        missing = [index for index in range(len(self.files)) if not self._complete(index)]
        if missing and self.folder.shards() is None:
            shards = sorted({index % self.share.num_shards for index in missing})
            log.warning(
                "waits for other shards",
                stage=self.folder.name,
                files=f"{len(missing)} of {len(self.files)}",
                shard_ids=shards,
            )
            return
        with self._alone():
            if self.folder.shards() is None:
                self._merge()

    def _alone(self) -> AbstractContextManager[None]:
        """Hold the merge lock: one process of this run at a time."""
        merge = self.folder.lock().with_name(f"{self.folder.name}-merge.lock")
        return hold_locks([(merge, False)], "merge there", wait=self.progress.print_line)

    def _read(self) -> None:
        """Read this process's files, and with shared work every free file."""
        candidates = self.share.candidates(len(self.files))
        done = [i for i in candidates if self._complete(i)]
        self.progress.advance(len(done), len(candidates))
        sample = BottomK(self.quotas)
        for index in done:  # later files need not repeat their sources
            offer_part(sample, self.parts[index])
        claims = WorkClaims(
            [i for i in candidates if i not in set(done)], self._complete, self.folder.lock
        )
        if not claims.left:
            return
        ingest = Ingest(self.cfg, sample)
        is_announced = False
        while claims.left:
            claimed = claims.next()
            if claimed is None:
                if claims.left:
                    if not is_announced:
                        is_announced = True
                        self.progress.print_line(
                            f"{self.folder.name}: waits for {claims.waits_for()}"
                        )
                    time.sleep(RETRY_S)
                continue
            index, lock = claimed
            try:
                file = self.files[index]
                ingest.read(file, self.parts[index], self._documents(file))
            finally:
                release(self.folder.lock(index), lock)
            self.progress.advance(1, None)

    def _complete(self, index: int) -> bool:
        counts = self.parts[index].counts()
        return counts is not None and counts.file == self.files[index].name

    def _documents(self, file: SourceFile) -> int | None:
        """Return the file's share of max_documents, independent of the reading process."""
        if self.data.max_documents is None:
            return None
        share, more = divmod(self.data.max_documents, len(self.files))
        return share + (file.index < more)

    def _merge(self) -> None:
        counts_list = [counts for part in self.parts if (counts := part.counts()) is not None]
        if len(counts_list) < len(self.parts):
            raise UserError(
                f"{self.folder.path}: another process could not read enough of the corpus. Fix "
                "that, then --resume"
            )
        sample = BottomK(self.quotas)
        for part in self.parts:
            offer_part(sample, part)
        priorities = sample.finish()
        lack = sum(q or 0 for q in self.quotas) - sum(map(len, priorities))
        chosen, doubles = choose(self.parts, priorities, is_short=lack > 0)
        if not len(chosen):
            self._read_again()
            raise UserError(no_source_reason(counts_list))
        self._check_readable(counts_list)
        sampled = self._write(chosen)
        screened = sum(sampled[code] for code in SCREENED)
        self._note(counts_list, sampled, doubles, self._shortfall(lack, len(chosen), screened))
        number = -(-len(chosen) // self.cfg.run.shard_records)
        self.folder.set_manifest({**self.manifest, "shards": number})
        shutil.rmtree(self.folder.path / "parts", ignore_errors=True)

    def _shortfall(self, lack: int, num_chosen: int, screened: int) -> dict[str, int]:
        """Return by how much the pool is smaller than asked for, by cause; empty if it is not.

        lack: sources that the corpus does not have."""
        causes = {
            "corpus_exhausted": lack,
            "per_bucket_quota": self.pool - num_chosen - lack,
            "screened": screened,
        }
        causes = {cause: number for cause, number in causes.items() if number > 0}
        if causes:
            log.warning(
                "the pool is smaller than asked for",
                asked=self.pool,
                sampled=num_chosen - screened,
                **causes,
            )
            reasons = ", ".join(f"{cause} {number:,}" for cause, number in causes.items())
            self.progress.print_line(
                f"{self.folder.name}: the pool has {num_chosen - screened:,} of {self.pool:,} "
                f"sources (missing: {reasons})"
            )
        return causes

    def _check_readable(self, counts_list: list[PartCounts]) -> None:
        """Raise UserError if too much of the corpus is unreadable."""
        unreadable = unread(sum((part.rejected for part in counts_list), Counter()))
        documents = sum(part.documents + part.broken_lines for part in counts_list)
        share = max(
            unreadable.total() / max(1, documents),
            unreadable[Reason.BROKEN_GZIP]
            / len(counts_list),  # the rest of such a file is unreadable
        )
        if share > self.data.max_unreadable:
            self._read_again()
            codes = ", ".join(f"{code} {count:,}" for code, count in sorted(unreadable.items()))
            raise UserError(
                f"data.files: {unreadable.total():,} of {documents:,} documents could not be read "
                f"({codes}){first_broken(counts_list)}. Repair them, or allow a share of "
                f"{share:.2g} by data.max_unreadable, and --resume"
            )

    def _read_again(self) -> None:
        """Make a resumed run read all files again after a repair, because each file influences
        which sources of the others are kept."""
        for part in self.parts:
            part.drop()

    def _write(self, chosen: np.ndarray) -> Counter[str]:
        """Write the shards with their marks, and all sources as Parquet.

        Returns counts of sources by type and bucket, and of removed ones by code."""
        counts: Counter[str] = Counter()
        size = self.cfg.run.shard_records
        with (
            PartReaders(self.parts) as readers,
            ParquetFile(self.folder.out_dir / _VIEW, record_columns(), "snappy") as parquet,
        ):
            verdict = screen(self.data, chosen, readers.read, self.folder.path / "parts")
            for index, start in enumerate(range(0, len(chosen), size)):
                records, removed = [], []
                for position, row in enumerate(chosen[start : start + size], start):
                    record = readers.read(row)
                    rejected = verdict(position, record)
                    if rejected is None:
                        records.append(record)
                    else:
                        removed.append(rejected)
                counts.update(f"{r['source_type']} {r['length_bucket_id']}" for r in records)
                counts.update(rejected.reason_code for rejected in removed)
                self._write_shard(index, records, removed)
                parquet.write(records)
            parquet.commit()
        return counts

    def _write_shard(
        self, index: int, records: list[Record], removed: list[RejectedRecord]
    ) -> None:
        codes = Counter(rejected.reason_code for rejected in removed)
        mark = {"records": len(records), "rejected": dict(sorted(codes.items())), "input": None}
        mark["digest"] = _write_all(self.folder.shard(index), records)
        if is_screened(self.data):
            removed_records = [rejected.as_record(self.folder.name) for rejected in removed]
            mark["rejected_digest"] = _write_all(self.folder.rejected(index), removed_records)
        self.folder.set_mark(index, mark)

    def _note(
        self,
        counts_list: list[PartCounts],
        sampled: Counter[str],
        doubles: int,
        shortfall: dict[str, int],
    ) -> None:
        """Write counts.json (in = sampled + rejected + screened), and set this process's stats."""
        rejected = sum((part.rejected for part in counts_list), Counter())
        num_segments = sum(part.pieces for part in counts_list)
        unreadable = unread(rejected)
        rejected -= unreadable
        rejected[Reason.DUPLICATE] = doubles
        rejected[Reason.NOT_SAMPLED] = num_segments - sampled.total() - rejected.total()
        screened = Counter({code: sampled.pop(code) for code in SCREENED if sampled[code]})
        rejected = +rejected
        buckets = len(self.cfg.bucketing.boundaries) - 1
        content = {
            "dataset": self.cfg.data.madlad_dataset,
            "revision": None
            if self.cfg.data.files
            else self.manifest["settings"]["data"]["madlad_revision"],
            "max_files": self.data.max_files,
            "max_documents": self.data.max_documents,
            "documents": sum(part.documents for part in counts_list),
            "unreadable": dict(sorted(unreadable.items())),
            "pieces": num_segments,
            "asked": self.pool,
            "sampled": sampled.total(),
            **({"shortfall": shortfall} if shortfall else {}),
            "rejected": dict(sorted(rejected.items())),
            **({"screened": dict(sorted(screened.items()))} if is_screened(self.data) else {}),
            "by_bucket": {
                kind: [sampled[f"{kind} {bucket}"] for bucket in range(buckets)] for kind in TYPES
            },
            "quotas": {
                kind: [q or 0 for q in self.quotas[i * buckets : (i + 1) * buckets]]
                for i, kind in enumerate(TYPES)
            },
            "files": [
                {
                    "file": part.file,
                    "documents": part.documents,
                    "newlines": part.newlines,
                    "broken_lines": part.broken_lines,
                    "broken": part.broken,
                }
                for part in counts_list
            ],
        }
        write_atomic(self.folder.path / "counts.json", to_line(content), alone=True)
        stats = self.progress.stats
        stats.records_in, stats.records_out = num_segments, sampled.total()
        stats.rejected.update(rejected + screened + unreadable)


def _within_limit(data: DataConfig, limit: int | None) -> tuple[DataConfig, int]:
    """Return the data config and the pool size; a limit reads only a slice of the corpus."""
    if limit is None:
        return data, data.sample_pool_size
    update = {
        "max_files": min(data.max_files or _LIMIT_FILES, _LIMIT_FILES),
        "max_documents": min(
            data.max_documents or _LIMIT_DOCUMENTS * limit, _LIMIT_DOCUMENTS * limit
        ),
    }
    return data.model_copy(update=update), min(limit, data.sample_pool_size)


def _write_all(path: Path, records: list[Record]) -> str:
    with ShardWriter(path) as writer:
        for record in records:
            writer.write(record)
        return writer.commit()
