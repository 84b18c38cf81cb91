"""Count what a stage did, for stats.json.

Records are counted from the marks of finished shards, so that a kill cannot falsify them. Each
process writes its calls and times to its own file in the stage's folder every few seconds; a kill
loses the last ones. stats.json is computed from both.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.net.http_clients import sync_client
from synth.storage.store import StageFolder, read_json, to_line

#: Seconds between two writes of a process's stats.
FLUSH_S = 5.0


@dataclass(slots=True)
class CallStats:
    """Calls of one service.

    requests: one per record, before merging.
    """

    requests: int = 0
    samples: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StageStats:
    """Counts of one process in one stage.

    open: records without a service's answer, by code.
    answers_kept: cached answers that were used.
    damaged_answers: broken cached answers, requested again.
    teacher: the client's live counts, or a copy.
    scorer: MetricX's own stats, see `scorer_stats`.
    of_others: True if these are sums over processes that write their own stats.
    """

    started: float = field(default_factory=time.monotonic)
    records_in: int = 0
    records_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    open: Counter[str] = field(default_factory=Counter)
    answers_kept: int = 0
    damaged_answers: int = 0
    teacher: Any = field(default_factory=dict)
    metricx: CallStats = field(default_factory=CallStats)
    judge: CallStats = field(default_factory=CallStats)
    scorer: dict[str, float] = field(default_factory=dict)
    process: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    began: float = field(default_factory=time.time)
    cpu_before: float = field(default_factory=time.process_time)
    flushed: float = 0.0
    of_others: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the stats as they are written."""
        teacher = self.teacher
        counts = dataclasses.asdict(teacher) if dataclasses.is_dataclass(teacher) else teacher  # type: ignore[arg-type]
        return {
            "began": self.began,
            "seconds": time.monotonic() - self.started,
            "cpu_seconds": time.process_time() - self.cpu_before,
            "records_in": self.records_in,
            "records_out": self.records_out,
            "open": dict(sorted(self.open.items())),
            "answers": {"kept": self.answers_kept, "damaged": self.damaged_answers},
            "teacher": dict(counts),
            "metricx": dataclasses.asdict(self.metricx),
            "judge": dataclasses.asdict(self.judge),
            "scorer": dict(self.scorer),
            "driver_memory_peak_bytes": _peak_resident_bytes(),
        }

    def add_up(self, stats_list: list[dict[str, Any]]) -> None:
        """Set the sums of other processes' `as_dict`, each with its `rejected`."""
        self.records_in = sum(process_stats["records_in"] for process_stats in stats_list)
        self.records_out = sum(process_stats["records_out"] for process_stats in stats_list)
        self.rejected = Counter(_sum(process_stats["rejected"] for process_stats in stats_list))
        self.open = Counter(_sum(process_stats["open"] for process_stats in stats_list))
        self.teacher = _sum(process_stats["teacher"] for process_stats in stats_list)
        self.metricx = CallStats(**_sum(process_stats["metricx"] for process_stats in stats_list))  # type: ignore[arg-type]
        self.judge = CallStats(**_sum(process_stats["judge"] for process_stats in stats_list))  # type: ignore[arg-type]

    def flush(self, folder: StageFolder, every_s: float = FLUSH_S) -> None:
        """Write this process's stats, unless they were written less than `every_s` ago."""
        now = time.monotonic()
        if self.of_others or now - self.flushed < every_s:
            return
        self.flushed = now
        path = folder.path / f"stats-{self.process}.json"
        write_atomic(path, to_line(self.as_dict()))


@dataclass(frozen=True, slots=True)
class StageCounts:
    """The records of a stage, from its marks: `records_in` = `records_out` + all of `rejected`.

    told: notes on accepted records, by code.
    open: records without a service's answer in unfinished shards, by code."""

    stage: str
    shards: int
    done: int
    records_out: int
    rejected: dict[str, int]
    told: dict[str, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)

    @property
    def records_in(self) -> int:
        return self.records_out + sum(self.rejected.values())


def count_stage(folder: StageFolder) -> StageCounts | None:
    """Return the counts of a stage's finished shards; None if it was not started."""
    shards = folder.shards()
    if shards is None:
        return None
    marks = [mark for i in range(shards) if (mark := folder.mark(i)) is not None]
    rejected: Counter[str] = Counter(_left_out(folder))
    notes: Counter[str] = Counter()
    open_: Counter[str] = Counter()
    for index in range(shards):
        open_.update(folder.left_open(index))
    for mark in marks:
        rejected.update(mark["rejected"])
        notes.update(mark.get("told", {}))
    records = sum(mark["records"] for mark in marks)
    return StageCounts(
        folder.name,
        shards,
        len(marks),
        records,
        dict(sorted(rejected.items())),
        dict(sorted(notes.items())),
        dict(sorted(open_.items())),
    )


def _left_out(folder: StageFolder) -> dict[str, int]:
    """Return the corpus segments that were left out, by code; they are too many to be stored."""
    repair_hint = f"repair it with `run --stage {folder.name} --repair 0`"
    counts = read_json(folder.path / "counts.json", "rejected", hint=repair_hint)
    return {} if counts is None else dict(counts["rejected"])


def unreadable(folder: StageFolder) -> dict[str, int]:
    """Return the unreadable documents of the corpus, by code; empty for most stages."""
    counts = read_json(folder.path / "counts.json") or {}
    return dict(counts.get("unreadable", {}))


def shortfall(folder: StageFolder) -> dict[str, int]:
    """Return by how many sources the pool is smaller than asked for, by cause."""
    counts = read_json(folder.path / "counts.json") or {}
    return dict(counts.get("shortfall", {}))


def funnel(names: Iterable[str], out_dir: Path, inputs: Path | None = None) -> list[StageCounts]:
    """Return the counts of the started stages, from out_dir or else from `inputs`."""
    started = []
    for name in names:
        counts = count_stage(StageFolder(out_dir, name))
        if counts is None and inputs is not None:
            counts = count_stage(StageFolder(inputs, name))
        if counts is not None:
            started.append(counts)
    return started


def process_stats(folder: StageFolder) -> dict[str, Any]:
    """Return the sums over the processes that worked on a stage.

    seconds: with at least one process working. records_per_s: over all processes. driver_cpu_s:
    summed over processes.
    """
    stats_list = []
    for path in sorted(folder.path.glob("stats-*.json")):
        try:
            stats_list.append(parse_json(path.read_bytes()))
        except (ValueError, FileNotFoundError):  # cleared concurrently, or the disk was full
            continue
    seconds = _union(
        (process_stats["began"], process_stats["began"] + process_stats["seconds"])
        for process_stats in stats_list
    )
    records = sum(process_stats["records_in"] for process_stats in stats_list)
    return {
        "processes": len(stats_list),
        "began": min((process_stats["began"] for process_stats in stats_list), default=0.0),
        "seconds": round(seconds, 3),
        "records_per_s": round(records / seconds, 3) if seconds else None,
        "records_done": records,
        "driver_cpu_s": round(
            sum(process_stats.get("cpu_seconds", 0.0) for process_stats in stats_list), 3
        ),
        **{
            key: _sum(process_stats.get(key, {}) for process_stats in stats_list)
            for key in ("answers", "teacher", "metricx", "judge")
        },
        "scorer": _merge_scorer(
            [process_stats["scorer"] for process_stats in stats_list if process_stats["scorer"]]
        ),
        "driver_memory_peak_bytes": max(
            (e["driver_memory_peak_bytes"] for e in stats_list), default=0
        ),
    }


def scorer_stats(urls: str | list[str], before: Mapping[str, float]) -> dict[str, float]:
    """Return what the scoring services counted since `before` (an earlier result, or {}).

    batches, batch_seconds, batch_samples: of all callers. memory_peak_bytes: the largest of one
    service, on its device or else its host. Empty if a service has no metrics.
    """
    key = os.environ.get("SCOREKIT_API_KEY")
    total = {"batches": 0.0, "batch_seconds": 0.0, "batch_samples": 0.0, "memory_peak_bytes": 0.0}
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            with sync_client(url, key=key, timeout_s=10.0) as client:
                answer = client.get("/metrics")
            answer.raise_for_status()
            metrics = _parse_metrics(answer.text)
        except (httpx.HTTPError, ValueError):
            return {}
        total["batches"] += metrics.get("scorekit_model_seconds_count", 0)
        total["batch_seconds"] += metrics.get("scorekit_model_seconds_sum", 0)
        total["batch_samples"] += metrics.get("scorekit_batch_samples_sum", 0)
        memory = metrics.get(
            "scorekit_device_memory_peak_bytes", metrics.get("scorekit_host_memory_peak_bytes", 0)
        )
        total["memory_peak_bytes"] = max(total["memory_peak_bytes"], memory)
    counted = ("batches", "batch_seconds", "batch_samples")
    since = {name: total[name] - before.get(name, 0) for name in counted}
    if min(since.values()) < 0:  # it was restarted, so its counts begin again
        since = {name: total[name] for name in counted}
    return total | since


def _parse_metrics(text: str) -> dict[str, float]:
    lines = (line.split() for line in text.splitlines() if line and line[0] not in "#{")
    return {line[0]: float(line[1]) for line in lines if len(line) > 1 and "{" not in line[0]}


def _merge_scorer(scorer_stats: list[dict[str, float]]) -> dict[str, float]:
    merged = _sum(scorer_stats)
    if scorer_stats:
        merged["memory_peak_bytes"] = max(stats["memory_peak_bytes"] for stats in scorer_stats)
    return merged


def _sum(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in counts:
        for key, value in mapping.items():
            total[key] = round(total.get(key, 0) + value, 6)
    return total


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, or in days from two days on."""
    hours, remainder = divmod(int(seconds), 3600)
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    return f"{hours}:{remainder // 60:02d}:{remainder % 60:02d}"


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length that the spans cover."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Exporter:
    """Exports the current stage's counts to Prometheus on loopback."""

    def __init__(self, port: int) -> None:
        """Start the exporter. Raises UserError if the port is in use or prometheus-client
        missing."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise UserError("run.prometheus_port: needs `pip install prometheus-client`") from None
        self._watched: tuple[str, StageStats] | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise UserError(f"run.prometheus_port: {port}: {error.strerror}") from None

    def watch(self, stage: str, stats: StageStats) -> None:
        """Export this stage from now on."""
        self._watched = (stage, stats)

    def collect(self) -> Iterable[Any]:
        """Yield one Prometheus sample for each count."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._watched is None:
            return
        stage, stats = self._watched
        totals = stats.as_dict()
        records = CounterMetricFamily(
            "synth_records", "Records by what became of them.", labels=["stage", "outcome"]
        )
        records.add_metric([stage, "kept"], stats.records_out)
        for code, count in sorted(stats.rejected.items()):
            records.add_metric([stage, code], count)
        yield records
        calls = CounterMetricFamily(
            "synth_calls", "Calls of services, by what is counted.", labels=["stage", "of", "count"]
        )
        for service in ("teacher", "metricx", "judge"):
            for name, value in totals[service].items():
                calls.add_metric([stage, service, name], value)
        yield calls
        yield GaugeMetricFamily(
            "synth_stage_seconds", "Since the stage began in this process.", totals["seconds"]
        )

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
