"""Merged views: what stands in shards, as one file under the name that people look for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from synth.stats import STAGES
from synth.store import StageFolder, to_line

if TYPE_CHECKING:
    from synth.context import Context

#: Stage -> the view of the records that it let through.
KEPT = {
    "prefilter_score": "prefilter_candidates.jsonl",
    "score_select_best": "final_candidates_topk.jsonl",
}
REJECTED = "rejected.jsonl"


def write_views(ctx: Context, stage: str) -> list[Path]:
    """Write the views that a stage which has just ended changes; the files that were written.

    Nothing for a stage of which shards are missing: another machine may be at them. Holds no more
    than a record in memory; the same bytes for the same shards.
    """
    out_dir, folder = ctx.out_dir, ctx.folder(stage)
    if not folder.done():
        return []
    written = []
    if stage in KEPT:
        path = out_dir / KEPT[stage]
        with _replacing(path) as file:
            if stage == "score_select_best":
                for record in folder.records():  # the stored candidates have their own place
                    record.pop("candidates", None)
                    file.write(to_line(record))
            else:
                _append(file, [folder.shard(i) for i in range(folder.shards() or 0)])
        written.append(path)
    path = out_dir / REJECTED
    with _replacing(path) as file:
        for name in STAGES:
            other = StageFolder(out_dir, name)
            _append(file, [other.rejected(i) for i in range(other.shards() or 0)])
    return [*written, path]


def outputs(out_dir: Path, stage: str) -> list[Path]:
    """What a stage leaves beside its own folder, whether or not it is there; `rejected.jsonl`,
    which belongs to all of them, is written anew after each."""
    names = {
        **{name: [view] for name, view in KEPT.items()},
        "sample_sources": ["sampled_sources.parquet"],
        "export": ["export", "report.html"],
    }
    return [out_dir / name for name in names.get(stage, [])]


def _append(file: IO[bytes], shards: list[Path]) -> None:
    for shard in shards:
        if shard.exists():
            with shard.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
