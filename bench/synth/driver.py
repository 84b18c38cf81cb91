"""Measure how many candidates per second one driver process feeds when all services are instant.

The teacher (n choices at once, made-up words) and MetricX (the fake backend) are separate processes
that answer at once. So the measured cost is that of the driver: requests, answers, shards, marks.

    python -m bench.synth.driver [--quick]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

from bench.common import WORK, Measurement, quiet_logs, run, service
from bench.kit.teacher import running_teacher
from synth.config import SynthConfig
from synth.execution.driver import run_map_stage
from synth.execution.processes import run_map_stage_on_processes
from synth.execution.stage import StageWork
from synth.execution.stage_start import prepare_stage
from synth.record import source_id
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.sample_sources import SampleSources
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import SelectSources
from synth.stages.table import map_stage
from synth.storage.store import ShardWriter, StageFolder, digest_of

CANDIDATES = 128
WORDS = 100  # a candidate; about 150 tokens
_TEXT = " ".join(f"단어{i}" for i in range(WORDS))
#: 8 GPUs make about 50 candidates a second; one driver should feed 20 times that.
AIM = 1000


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sources = 200 if quick else 2000
    out_dir = WORK / "synth-driver"
    shutil.rmtree(out_dir, ignore_errors=True)
    _write_sources(out_dir, sources, SelectSources.name)
    flags = ("--cache", "memory", "--log-level", "error")
    with (
        running_teacher(_answers) as teacher_url,
        service("scorekit.server.fake", *flags) as (_, url),
    ):
        cfg = SynthConfig.model_validate(
            {
                "run": {"out_dir": str(out_dir)},
                "data": {"src_lang": "eng", "tgt_lang": "kor"},
                "teacher": {"base_url": teacher_url, "model": "teacher"},
                "final_generation": {"num_candidates": CANDIDATES},
                "metricx": {"url": url, "checkpoint": "fake-metricx", "batch_size": 128},
            }
        )
        yield from _prefilter(cfg, 10 * sources)
        for stage in map(map_stage, (Generate128.name, ScoreSelectBest.name)):
            work = StageWork(cfg, StageFolder(out_dir, stage.name), (out_dir,))
            manifest = prepare_stage(stage, [], work)
            started, cpu = time.perf_counter(), time.process_time()
            asyncio.run(run_map_stage(stage, manifest, work))
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            num_candidates = sources * CANDIDATES
            stats = work.progress.stats
            assert stats.records_out == sources, stats
            yield Measurement(
                f"{stage.name}, one driver process, {CANDIDATES} candidates of {WORDS} words a "
                "source",
                num_candidates / seconds,
                "candidates/s",
                at_least=AIM,
                details={"candidates": num_candidates, "seconds": seconds, "driver_cpu_s": cpu},
            )
    shutil.rmtree(out_dir, ignore_errors=True)


def _prefilter(cfg: SynthConfig, sources: int) -> Iterator[Measurement]:
    """Measure two translations and two scores of each source: the most requests per record."""
    seconds = {}
    for processes in (1, 2):
        out_dir = cfg.run.out_dir.with_name(f"{cfg.run.out_dir.name}-{processes}")
        shutil.rmtree(out_dir, ignore_errors=True)
        run_config = cfg.run.model_copy(update={"out_dir": out_dir})
        _write_sources(out_dir, sources, SampleSources.name)
        stage = map_stage(PrefilterScore.name)
        pair_cfg = cfg.model_copy(update={"run": run_config})
        work = StageWork(pair_cfg, StageFolder(out_dir, stage.name), (out_dir,))
        manifest = prepare_stage(stage, [], work)
        started, cpu = time.perf_counter(), _cpu_s()
        run_map_stage_on_processes(stage, manifest, work, processes)
        seconds[processes], cpu = time.perf_counter() - started, _cpu_s() - cpu
        stats = work.progress.stats
        assert stats.records_out == sources, stats
        shutil.rmtree(out_dir)
        yield Measurement(
            f"{stage.name}, driver processes: {processes}",
            sources / cpu,
            "records a CPU second",
            details={"records": sources, "seconds": seconds[processes], "driver_cpu_s": cpu},
        )
    yield Measurement(
        "  two against one, by the clock (the servers run on the same cores)",
        seconds[1] / seconds[2],
        "times",
        details={"cores": os.cpu_count()},
    )


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _write_sources(out_dir: Any, count: int, stage: str) -> None:
    folder = StageFolder(out_dir, stage)
    per_shard = 200
    shards = -(-count // per_shard)
    folder.set_manifest({"stage": folder.name, "digest": digest_of(count), "shards": shards})
    for index in range(shards):
        with ShardWriter(folder.shard(index)) as shard:
            for number in range(index * per_shard, min(count, (index + 1) * per_shard)):
                text = f"Sentence {number} is to be translated. " + "It has more words. " * 15
                shard.write(
                    {
                        "source_id": source_id(text),
                        "source_text": text,
                        "source_type": "sentence",
                        "length_bucket_id": 0,
                    }
                )
            folder.set_mark(index, {"records": shard.records, "digest": shard.commit()})


def _answers(body: dict[str, Any]) -> tuple[list[str], int]:
    name = hashlib.blake2b(json.dumps(body["messages"]).encode(), digest_size=6).hexdigest()
    return [f"{name} {body['seed'] + i} {_TEXT}." for i in range(body["n"])], 150 * body["n"]


if __name__ == "__main__":
    quiet_logs()
    run("synth_driver", __doc__, questions)
