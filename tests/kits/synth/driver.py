"""A run of the stages between sources and filters: config, sources, stages, results."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synth.config import PART, SynthConfig
from synth.execution.clients import EASY
from synth.execution.driver import run_map_stage
from synth.execution.stage import MapStage, Stage, StageProgress, StageWork
from synth.execution.stage_start import prepare_stage
from synth.record import source_id
from synth.stages.table import ORDER
from synth.storage.shares import ShardShare
from synth.storage.store import Record, ShardWriter, StageFolder, digest_of

STAGES = ORDER[1:5]
NAMES = [stage.name for stage in STAGES]


def korean(body: dict[str, Any], seed: int | None) -> str:
    """Return a made-up translation: a function of the request."""
    request_key = f"{body['messages'][-1]['content']}|{body['temperature']}|{seed}"
    digest = hashlib.blake2b(request_key.encode(), digest_size=6).digest()
    return " ".join(chr(0xAC00 + byte * 40) + "다" for byte in digest) + "."


def is_paid(body: dict[str, Any]) -> bool:
    """Return whether a teacher's request asks for a translation. The preflight asks for one
    token.
    """
    return int(body["max_tokens"]) > 1


def config(out_dir: Path, teacher: Any, metricx: Any, **more: Any) -> SynthConfig:
    teacher.well()
    data: dict[str, dict[str, Any]] = {
        "run": {"out_dir": str(out_dir), "shard_records": 8},
        "data": {"src_lang": "eng", "tgt_lang": "kor", "target_examples_total": 10},
        "teacher": {
            "base_url": teacher.url,
            "model": teacher.model,
            "max_concurrency": 8,
            "retry": {"max_attempts": 2, "backoff_s": [0.01]},
            "wait_for_server_s": 0,
        },
        "final_generation": {"num_candidates": 6, "store_top_k": 3},
        "metricx": {"url": metricx.url, "checkpoint": "fake-metricx"},
    }
    for key, value in more.items():
        section, _, name = key.partition("__")
        data[section] = {**data.get(section, {}), name: value}
    return SynthConfig.model_validate(data)


def write_sources(out_dir: Path, texts: Sequence[str], per_shard: int = 8) -> None:
    """Write the output of sample_sources."""
    folder = StageFolder(out_dir, "sample_sources")
    folder.set_manifest(
        {"stage": folder.name, "digest": digest_of(texts), "shards": -(-len(texts) // per_shard)}
    )
    for index in range(0, len(texts), per_shard):
        with ShardWriter(folder.shard(index // per_shard)) as shard:
            for offset, text in enumerate(texts[index : index + per_shard]):
                shard.write(
                    {
                        "source_id": source_id(text),
                        "source_text": text,
                        "source_type": "sentence",
                        "length": 5.0,
                        "length_bucket_id": (index + offset) % 3,
                        "source_meta": {},
                    }
                )
            mark = {"records": shard.records, "rejected": {}, "input": None}
            folder.set_mark(index // per_shard, {**mark, "digest": shard.commit()})


TEXTS = [f"Sentence number {i} is to be translated." for i in range(20)]


def stage_work(
    stage: Stage,
    cfg: SynthConfig,
    *,
    limit: int | None = None,
    shard_id: int = 0,
    num_shards: int = 1,
    share: bool = False,
    give_up: bool = False,
    **progress: Any,
) -> StageWork:
    """Return the work of a process on a stage.

    progress: fields of `StageProgress`.
    """
    out_dir = cfg.run.out_dir
    return StageWork(
        cfg,
        StageFolder(out_dir, stage.name),
        (out_dir,),
        limit=limit,
        share=ShardShare(shard_id, num_shards, share),
        give_up=give_up,
        progress=StageProgress(**progress),
    )


def prepared(
    stage: Stage,
    cfg: SynthConfig,
    later: Sequence[Stage] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> tuple[dict[str, Any], StageWork]:
    """Return the manifest of a stage that is to run, and its work.

    options: of `stage_work`.
    """
    work = stage_work(stage, cfg, **options)
    return prepare_stage(stage, later, work, resume=resume, overwrite=overwrite), work


def run(cfg: SynthConfig, *, stages: Sequence[Any] = STAGES, **options: Any) -> list[StageProgress]:
    progresses = []
    for stage in stages:
        manifest, work = prepared(stage, cfg, STAGES[STAGES.index(stage) + 1 :], **options)
        if isinstance(stage, MapStage):
            asyncio.run(run_map_stage(stage, manifest, work))
        elif not work.folder.done():
            stage.run(work, manifest)
        progresses.append(work.progress)
    return progresses


def output(out_dir: Path) -> dict[tuple[str, int], tuple[str, str, int]]:
    """Return the digests of all shards, which are those of their files.

    The candidates of a finished run are deleted.
    """
    marks = {}
    for name in NAMES:
        folder = StageFolder(out_dir, name)
        for index in range(folder.shards() or 0):
            folder.verify(index)
            mark = folder.mark(index)
            assert mark is not None
            marks[name, index] = (mark["digest"], mark["rejected_digest"], mark["records"])
    return marks


def most_in_flight(cfg: SynthConfig, n: int) -> int:
    """Return the maximum number of sequences that a driver has in flight at the teacher.

    It is the bound of docs/how-to/synthesis.md, if the driver requests n candidates per source.
    """
    teacher = cfg.teacher
    sequences = teacher.max_sequences or PART * teacher.max_concurrency
    return min(teacher.max_concurrency * min(n, PART, sequences), sequences)


def count_repeated_requests(requests: Sequence[Any]) -> int:
    """Return how many sequences were requested from a teacher again, whether or not it answered.

    Health checks do not count.
    """
    count_by_sequence: Counter[tuple[str, int]] = Counter()
    for body in (request.body for request in requests):
        text, first = body["messages"][-1]["content"], body.get("seed") or 0
        if not text.endswith(EASY):
            seeds = range(first, first + (body.get("n") or 1)) if body["temperature"] else [-1]
            count_by_sequence.update((text, seed) for seed in seeds)
    return sum(count - 1 for count in count_by_sequence.values())


def records(out: Path, stage: str) -> list[Record]:
    return list(StageFolder(out, stage).records())
