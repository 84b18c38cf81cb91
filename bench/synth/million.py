"""Measure what a million sources cost the driver: memory, hours by stage, disk.

The full command runs, from corpus to export, with a teacher, MetricX and a judge that are separate
processes and answer at once. Their answers are a function of the request. So the hours are the
driver's own CPU time, without the models. A hundredth of the sources get 128 candidates each.

    python -m bench.synth.million [--quick] [--sources N]

--sources 1000000 runs a million sources. With fewer, the cost of a million and of a hundred million
is estimated from the CPU time and the bytes per record, which the output has, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.common import ROOT, WORK, Measurement, quiet_logs, run, service
from bench.kit.teacher import running_teacher
from scorekit.command import run_command
from scorekit.config import load_config
from scorekit.processes import end_with_parent
from synth.config import SynthConfig
from synth.report.estimate import plan
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.table import BY_NAME
from synth.storage.stats import process_stats
from synth.storage.store import StageFolder

SOURCES, QUICK = 20_000, 1000
CANDIDATES = 128
#: One of so many sources is selected, as 10,000 of a million are.
SELECTED = 100
LOOK_S = 1.0
#: Megabytes that a driver may grow by over a hundred thousand sources: a million then fit anywhere.
MOST_GROWTH = 10.0


def questions(quick: bool, sources: int | None = None) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sources = sources or (QUICK if quick else SOURCES)
    folder = WORK / "synth-million"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder / "corpus", sources)
    flags = ("--cache", "memory", "--log-level", "error")
    with (
        running_teacher(_answers) as teacher,
        service("scorekit.server.fake", *flags) as (_, metricx),
        service("services.judge", *flags) as (_, judge),
    ):
        config = write_config(folder, sources, teacher, metricx, judge)
        looked = _run(config)
    out_dir = folder / "run"
    stats_by_stage = {name: process_stats(StageFolder(out_dir, name)) for name in BY_NAME}
    yield from _memory(looked, stats_by_stage, sources)
    yield from _hours(stats_by_stage, sources, looked[-1][0] - looked[0][0])
    yield from _disk(out_dir, sources)
    shutil.rmtree(folder, ignore_errors=True)


def _run(config: Path) -> list[tuple[float, int]]:
    """Run the command in a separate process, and return (time, memory in bytes) until it ends."""
    command = [sys.executable, "-m", "synth", "run", "--config", str(config), "--stage", "all"]
    looked: list[tuple[float, int]] = []
    with (config.parent / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=end_with_parent()
        )
        while process.poll() is None:
            resident = _resident(process.pid)
            if resident:
                looked.append((time.time(), resident))
            time.sleep(LOOK_S)
    log_end = (config.parent / "driver.log").read_text(errors="replace")[-2000:]
    assert process.returncode == 0, log_end
    return looked


def _resident(pid: int) -> int:
    """Return the bytes in memory of a process and of its children."""
    family, num_bytes = {pid}, 0
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if int(entry.name) in family or parent in family:
                family.add(int(entry.name))
                num_bytes += int((entry / "statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return num_bytes


def _memory(
    looked: list[tuple[float, int]], stats_by_stage: dict[str, Any], sources: int
) -> Iterator[Measurement]:
    """Yield the growth of the driver's memory during the stage that reads every source and asks
    twice.
    """
    peak = max(resident for _, resident in looked) / 2**20
    started, seconds = (
        stats_by_stage[PrefilterScore.name]["began"],
        stats_by_stage[PrefilterScore.name]["seconds"],
    )
    # Its first third fills windows and caches.
    inside = [
        (t, resident) for t, resident in looked if started + seconds / 3 <= t <= started + seconds
    ]
    growth = None
    thinned = inside[:: max(1, len(inside) // 50)]
    if len(inside) >= 10:
        growth = _slope(inside) * seconds / sources * 100_000 / 2**20
    yield Measurement(
        "growth of the driver's memory over prefilter_score, 100,000 sources",
        growth,
        "MB",
        at_most=MOST_GROWTH,
        note="too short to tell",
        details={
            "looks": len(inside),
            "seconds": seconds,
            "sources": sources,
            "megabytes": [round(resident / 2**20, 1) for _, resident in thinned],
        },
    )
    yield Measurement(
        f"most memory of the driver and its processes, {sources:,} sources", peak, "MB"
    )


def _slope(points: list[tuple[float, int]]) -> float:
    """Return bytes per second, by least squares."""
    middle_t = sum(t for t, _ in points) / len(points)
    middle = sum(resident for _, resident in points) / len(points)
    variance = sum((t - middle_t) ** 2 for t, _ in points)
    return sum((t - middle_t) * (resident - middle) for t, resident in points) / variance


def _hours(stats_by_stage: dict[str, Any], sources: int, seconds: float) -> Iterator[Measurement]:
    """Yield the CPU time of each stage, as measured and scaled to a million sources."""
    yield Measurement(
        f"the whole command, {sources:,} sources",
        seconds / 3600,
        "hours",
        details={"wall_s": {n: t["seconds"] for n, t in stats_by_stage.items()}},
    )
    for name, stats in stats_by_stage.items():
        cpu = stats["driver_cpu_s"]
        yield Measurement(
            f"{name}: CPU of the driver for a million sources",
            cpu * 1e6 / sources / 3600,
            "hours",
            details={
                "cpu_s": cpu,
                "wall_s": stats["seconds"],
                "sources": sources,
                "records": stats["records_done"],
                "a_hundred_million_in_hours": cpu * 1e8 / sources / 3600,
            },
        )


def _disk(out_dir: Path, sources: int) -> Iterator[Measurement]:
    """Yield the disk usage of the finished run, and compare it with the estimate."""
    parts = {f"stages/{name}": _size(out_dir / "stages" / name) for name in BY_NAME}
    parts |= {path.name: _size(path) for path in out_dir.iterdir() if path.name != "stages"}
    total_bytes = _size(out_dir)
    yield Measurement(
        "disk of a million sources",
        total_bytes * 1e6 / sources / 1e9,
        "GB",
        details={
            "bytes": parts,
            "sources": sources,
            "a_hundred_million_in_tb": total_bytes * 1e8 / sources / 1e12,
        },
    )
    estimate = plan(load_config(SynthConfig, out_dir / "config.yaml"))
    deleted_bytes = next(
        cost.disk_bytes for cost in estimate.costs if cost.stage == Generate128.name
    )
    yield Measurement(
        "disk that `estimate` tells, without candidates that went, against it",
        (estimate.disk_bytes - deleted_bytes) / total_bytes,
        "times",
        at_least=0.5,
        at_most=2.0,
        details={"told": estimate.disk_bytes, "candidates": deleted_bytes, "real": total_bytes},
    )


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


# -- what is read, and who is asked ----------------------------------------------------


def write_corpus(folder: Path, sources: int, files: int = 8) -> None:
    """Write MADLAD-shaped documents of different sentences, 1.5 times as many as needed."""
    folder.mkdir()
    words = _words("src_text", 3)
    for number in range(files):
        rng = random.Random(number)
        with gzip.open(folder / f"part-{number}.jsonl.gz", "wt", 1, encoding="utf-8") as file:
            left = 3 * sources // (2 * files) + 1
            while left > 0:
                lines = [_sentence(rng, words) for _ in range(10)]
                file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
                left -= len(lines)


def _sentence(rng: random.Random, words: list[str]) -> str:
    return " ".join(rng.choices(words, k=rng.choice((8, 12, 20, 35, 60)))).capitalize() + "."


@cache
def _words(key: str, min_length: int) -> list[str]:
    """Return the words of the demo's texts in alphabetical order."""
    lines = (ROOT / "demo/data/pydocs.jsonl").read_text(encoding="utf-8").splitlines()
    every = {word for line in lines for word in json.loads(line)[key].split()}
    return sorted(w for w in every if w.isalpha() and len(w) >= min_length and w.lower() == w)


def write_config(folder: Path, sources: int, teacher: str, metricx: str, judge: str) -> Path:
    """Write a config of all seven stages, as in configs/synth/seed.yaml."""
    config: dict[str, Any] = {
        "run": {"out_dir": str(folder / "run")},
        "data": {
            "files": [str(folder / "corpus/*.jsonl.gz")],
            "src_lang": "eng",
            "tgt_lang": "kor",
            "sample_pool_size": sources,
            "target_examples_total": max(1, sources // SELECTED),
        },
        "teacher": {"base_url": teacher, "model": "teacher", "max_concurrency": 64},
        "final_generation": {
            "num_candidates": CANDIDATES,
            "store_top_k": 4,
            "blob": {"blob_ratio": 0.0, "enabled": False},
        },
        "metricx": {"url": metricx, "checkpoint": "fake-metricx", "batch_size": 128},
        "filters": {"llm_judge": {"url": judge}, "on_reject": "next_best"},
    }
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _answers(body: dict[str, Any]) -> tuple[list[str], int]:
    source = body["messages"][-1]["content"].rpartition("\n")[2]
    rng = random.Random(f"{source}|{body['temperature']}|{body['seed']}")
    count, choices = max(3, len(source) // 7), body.get("n") or 1
    words = _words("ref_text", 2)
    texts = [" ".join(rng.choices(words, k=count)) + "." for _ in range(choices)]
    return texts, 2 * count * choices


def _main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sources", type=int, default=None)
    options, sys.argv[1:] = parser.parse_known_args()
    quiet_logs()
    run("synth_million", __doc__, lambda quick: questions(quick, options.sources))


if __name__ == "__main__":
    run_command(_main, stdout="log")
