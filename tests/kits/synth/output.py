"""A run of the pipeline made by hand, up to its export."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from synth.config import SynthConfig
from synth.execution.driver import run_map_stage
from synth.execution.stage import GlobalStage, StageProgress
from synth.record import source_id
from synth.report.views import write_stats, write_views
from synth.stages.table import ORDER, map_stage
from synth.storage.stats import StageStats
from synth.storage.store import Record, ShardWriter, StageFolder, digest_of, read_records
from tests.kits.synth.driver import prepared

ROOT = Path(__file__).parents[3]


HOSTILE = '</script><img src=x onerror="alert(1)"> \x1b[2J'


INFO = {
    "service": "metricx",
    "model": "metricx-24-tiny",
    "revision": "abc123",
    "dtype": "float32",
    "device": "cpu",
    "max_input_length": 1536,
    "commit": None,
    "uptime_s": 12.5,
    "versions": {"scorekit": "0.2.0", "torch": "2.9.0", "transformers": "4.57.0", "comet": None},
}


def config(out_dir: Path, **sections: dict[str, Any]) -> SynthConfig:
    base: dict[str, dict[str, Any]] = {
        "run": {"out_dir": str(out_dir), "shard_records": 4},
        "data": {
            "src_lang": "eng",
            "tgt_lang": "kor",
            "sample_pool_size": 12,
            "target_examples_total": 10,
            "madlad_split": "noisy",
        },
        "teacher": {
            "base_url": "http://user:secret@localhost:8000/v1?token=secret",
            "model": "served-name",
        },
        "final_generation": {"num_candidates": 8, "store_top_k": 2},
        "metricx": {"checkpoint": "org/metricx-24-tiny"},
        "filters": {"llm_judge": {"enabled": False}},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return SynthConfig.model_validate(base)


def gold(count: int) -> list[tuple[str, str]]:
    """Return true pairs; every fifth translation has chatter."""
    with (ROOT / "demo" / "data" / "pydocs.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if 40 < len(row["src_text"]) < 300]
    return [(row["src_text"], row["ref_text"]) for row in rows[:count]]


def write_stage(
    folder: StageFolder, shards: Sequence[Sequence[Record]], rejected: Iterable[Record] = ()
) -> None:
    """Write a finished stage.

    shards: lists of records.
    rejected: records that the first shard has rejected.
    """
    folder.set_manifest(
        {
            "stage": folder.name,
            "settings": {},
            "input": None,
            "limit": None,
            "digest": digest_of(folder.name),
            "shards": len(shards),
        }
    )
    for index, records in enumerate(shards):
        rejected_records = [{**r, "stage": folder.name} for r in (rejected if index == 0 else ())]
        codes = Counter(record["reason_code"] for record in rejected_records)
        with ShardWriter(folder.shard(index)) as shard, ShardWriter(folder.rejected(index)) as out:
            for record in records:
                shard.write(record)
            for record in rejected_records:
                out.write(record)
            out.commit()
            folder.set_mark(
                index,
                {
                    "records": len(records),
                    "rejected": codes,
                    "input": None,
                    "digest": shard.commit(),
                },
            )


def make_run(out_dir: Path, count: int = 10, chatter: int = 5) -> list[Record]:
    """Write a run up to score_select_best: of 12 sources 10 were selected, in three shards."""
    records: list[Record] = []
    for index, (src, mt) in enumerate(gold(count + 2)):
        madlad = {
            "lang": "en",
            "split": "noisy",
            "doc_id": f"en_noisy_0000.jsonl.gz:{index + 1}",
            "file": "en_noisy_0000.jsonl.gz",
            "line": index + 1,
            "segment_index": 0,
            "segments": 1,
            "span": [0, len(src)],
        }
        records.append(
            {
                "source_id": source_id(src),
                "source_text": src,
                "length": len(src) / 4.0,
                "source_type": "blob" if index % 2 else "sentence",
                "length_bucket_id": index % 3,
                "source_meta": {"madlad": madlad},
            }
        )
        if chatter and index % chatter == 2:
            mt = f"번역: {mt}"
        worst = {"index": 3, "text": mt + " 음", "score": 20.0 + index / 10}
        records[-1]["later"] = {
            "prefilter": {
                "score_greedy": 5.0,
                "score_sample": 3.0 + index / 4,
                "improvement": 2.0 - index / 4,
            },
            "topk": [{"index": 6, "text": mt, "score": 1.5 + index / 8}],
            "worst": None if index == 4 else worst,
            "candidate_counts": {"asked": 8, "scored": 7, "out": {"cut": 1}},
        }
    later = [record.pop("later") for record in records]
    write_stage(StageFolder(out_dir, "sample_sources"), _cut(records))
    counts = {
        "pieces": 40,
        "rejected": {"duplicate": 8, "not_sampled": 20},
        "documents": 15,
        "unreadable": {"broken_json": 1},
        "files": [{}, {}],
        "revision": "c0ffee",
        "max_files": 2,
        "max_documents": None,
    }
    (StageFolder(out_dir, "sample_sources").path / "counts.json").write_text(json.dumps(counts))
    records = [{**r, "prefilter": x["prefilter"]} for r, x in zip(records, later, strict=True)]
    write_stage(StageFolder(out_dir, "prefilter_score"), _cut(records))
    not_selected = [{**r, "reason_code": "not_selected", "reason": ""} for r in records[count:]]
    records = [{**r, "rank": rank} for rank, r in enumerate(records)]
    write_stage(StageFolder(out_dir, "select_sources"), _cut(records[:count]), not_selected)
    write_stage(StageFolder(out_dir, "generate_128"), _cut(records[:count]))
    records = [{**r, **x} for r, x in zip(records[:count], later, strict=False)]
    write_stage(StageFolder(out_dir, "score_select_best"), _cut(records))
    (out_dir / "service-metricx.json").write_text(json.dumps(INFO))
    return records


def _cut(records: Sequence[Record], size: int = 4) -> list[Sequence[Record]]:
    return [records[i : i + size] for i in range(0, len(records), size)]


def run_filter(cfg: SynthConfig, **more: Any) -> StageProgress:
    stage = map_stage("format_filter")
    manifest, work = prepared(stage, cfg, [ORDER[-1]], **more)
    asyncio.run(run_map_stage(stage, manifest, work))
    return work.progress


def run_export(cfg: SynthConfig, **more: Any) -> StageProgress:
    stage = ORDER[-1]
    assert isinstance(stage, GlobalStage)
    manifest, work = prepared(stage, cfg, **more)
    stage.run(work, manifest)
    return work.progress


def views_of(
    cfg: SynthConfig, stage: str, print_line: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write the views of a stage as a run does."""
    return write_views(StageFolder(cfg.run.out_dir, stage), cfg.run.view_records, print_line)


def stats_of(cfg: SynthConfig, stage: str, stats: StageStats | None = None) -> dict[str, Any]:
    """Write stats.json after a stage as a run does."""
    return write_stats(cfg, StageFolder(cfg.run.out_dir, stage), stats or StageStats())


def train(cfg: SynthConfig) -> list[Record]:
    return list(read_records(cfg.run.out_dir / "export" / "train.jsonl"))


def exported_run(folder: Path) -> SynthConfig:
    """Write a run with its export, and return its config."""
    cfg = config(folder, export={"preference_pairs": True})
    folder.mkdir()
    make_run(cfg.run.out_dir)
    run_filter(cfg)
    run_export(cfg)
    return cfg


def printed(table: RenderableType) -> str:
    """Return the text of a terminal table."""
    console = Console(width=200)
    with console.capture() as text:
        console.print(table)
    return text.get()
