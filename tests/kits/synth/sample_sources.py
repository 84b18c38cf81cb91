"""Configs and files of the sampling stage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from demo.madlad_shard import documents, write_shard
from synth.config import SynthConfig
from synth.stages.sample_sources import SampleSources
from synth.storage.store import Record, StageFolder, digest_file
from tests.kits.synth.driver import prepared

MADLAD = Path(__file__).parents[2] / "data/madlad"


V1, V15 = str(MADLAD / "data/*/*.jsonl.gz"), str(MADLAD / "data-v1p5/*/*.jsonl.gz")


def config(out_dir: Path, files: Iterable[str] = (V1,), **sections: Any) -> SynthConfig:
    data = {
        "src_lang": "kor",
        "tgt_lang": "eng",
        "sample_pool_size": 120,
        "files": list(files),
        "max_unreadable": 1.0,
    }
    content = {
        "run": {"out_dir": str(out_dir), "shard_records": 50, **sections.pop("run", {})},
        "data": {**data, **sections.pop("data", {})},
        "segmentation": {"min_chars": 10, **sections.pop("segmentation", {})},
        "final_generation": {"blob": sections.pop("blob", {})},
        **sections,
    }
    return SynthConfig.model_validate(content)


def run(cfg: SynthConfig, **more: Any) -> StageFolder:
    """Run the stage as the driver does, and return its folder."""
    stage = SampleSources()
    manifest, work = prepared(stage, cfg, **more)
    stage.run(work, manifest)
    return work.folder


def records(cfg: SynthConfig, **more: Any) -> list[Record]:
    return list(run(cfg, **more).records())


def counts(folder: StageFolder) -> dict[str, Any]:
    return json.loads((folder.path / "counts.json").read_bytes())


def tree(out_dir: Path) -> dict[str, str]:
    """Return every file of the stage, by its bytes."""
    paths = [p for p in Path(out_dir).rglob("*") if p.is_file() and p.name != "merge.lock"]
    return {str(p.relative_to(out_dir)): digest_file(p) for p in paths}


def stored(position: Mapping[str, Any], newlines: str = "real") -> str:
    """Return the document that provenance names."""
    folder = MADLAD / ("data-v1p5/ko" if newlines == "escaped" else "data/ko")
    lines = gzip.decompress((folder / position["file"]).read_bytes()).splitlines()
    return json.loads(lines[position["line"] - 1])["text"]


def shards(tmp_path: Path, number: int = 4, lang: Literal["en", "ko"] = "ko") -> list[str]:
    for i in range(number):
        write_shard(tmp_path / "corpus", documents(lang, 8 * i, 8), lang=lang, index=i)
    return [str(tmp_path / "corpus/data/*/*.gz")]
