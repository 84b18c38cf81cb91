"""Write stats.json after each stage, and views: the records of its shards as one readable file.

A view is written once, when its stage is done; each stage appends to `rejected.jsonl`. With more
than `run.view_records` records no view is written, because it would need the disk space again,
uncompressed. `shown_records` works in both cases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import atomic_writer, write_atomic
from scorekit.locks import hold_locks
from synth.config import SynthConfig
from synth.location import need_run
from synth.stages.table import BY_NAME, ORDER
from synth.storage.distributions import as_dicts
from synth.storage.stats import StageStats, funnel, process_stats, shortfall, unreadable
from synth.storage.store import REJECTED, Record, StageFolder, digest_of, open_lines, to_line

_STATE = ".views.json"


def write_stats(cfg: SynthConfig, folder: StageFolder, stats: StageStats) -> dict[str, Any]:
    """Write this process's stats of a stage, then stats.json from the stages' folders; return
    it.

    folder: the stage's output.
    """
    out_dir = folder.out_dir
    stats.flush(folder, every_s=0.0)
    stages = {}
    for counts in funnel(BY_NAME, out_dir):
        folder = StageFolder(out_dir, counts.stage)
        stages[counts.stage] = {
            "records_in": counts.records_in,
            "records_out": counts.records_out,
            "rejected": counts.rejected,
            "told": counts.told,
            "unreadable": unreadable(folder),
            "shortfall": shortfall(folder),
            "shards": counts.shards,
            "shards_done": counts.done,
            **process_stats(folder),
            "distributions": _distributions(cfg, folder) if folder.done() else {},
        }
    content = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "stages": stages}
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    write_atomic(out_dir / "stats.json", text.encode())
    return content


def _distributions(cfg: SynthConfig, folder: StageFolder) -> dict[str, Any]:
    """Return a stage's distributions; its records are read once, not after every later stage."""
    digests = [(folder.mark(i) or {}).get("digest") for i in range(folder.shards() or 0)]
    digest = digest_of(digests)
    path = folder.path / "distributions.json"
    try:
        stored = parse_json(path.read_bytes())
        if stored["of"] == digest:
            return dict(stored["distributions"])
    except (FileNotFoundError, ValueError, KeyError):
        pass
    distributions = as_dicts(BY_NAME[folder.name].distributions(cfg, folder.records()))
    write_atomic(path, to_line({"of": digest, "distributions": distributions}))
    return distributions


def write_views(
    folder: StageFolder, most_records: int, print_line: Callable[[str], None]
) -> list[Path]:
    """Write the views of a stage that has just ended; return the written files.

    folder: the stage's output.
    most_records: a view of more is not written, which `print_line` tells the user.

    Nothing is written if shards are missing, because another machine may be working on them. It has
    one record in memory at a time; equal shards give equal bytes.
    """
    if not folder.done():
        return []

    def should_write(path: Path, records: int) -> bool:
        if records <= most_records:
            return True
        path.unlink(missing_ok=True)
        print_line(
            f"{path.name}: {records:,} records are more than run.view_records: "
            f"`scorekit synth show {path.stem}` prints them"
        )
        return False

    lock = folder.out_dir / ".locks" / "views.lock"
    with hold_locks([(lock, False)], "write views", wait=print_line):
        return [
            *_write_kept(folder, should_write),
            *_write_rejected(folder.out_dir, should_write),
        ]


def shown_records(out_dir: Path, name: str) -> Iterator[Record]:
    """Yield the records of a view ("rejected", or a stage's view), or a stage's accepted records.

    Raises UserError for an unknown name, and if there is no output."""
    views = {stage.view.removesuffix(".jsonl"): stage.name for stage in ORDER if stage.view}
    stages = [stage.name for stage in ORDER if stage.has_shards]
    view_name = name.removesuffix(".jsonl")
    if view_name == "rejected":
        need_run(out_dir)
        for rejecting_stage in ORDER:
            yield from StageFolder(out_dir, rejecting_stage.name).all_rejected()
        return
    stage = views.get(view_name, view_name)
    if stage not in stages:
        available = ", ".join(["rejected", *views, *stages])
        raise UserError(f"show {name}: give one of {available}")
    folder = StageFolder(out_dir, stage)
    if folder.shards() is None:
        raise UserError(f"{folder.path}: no output there. Run --stage {stage} first")
    for record in folder.records():
        yield _without_candidates(record) if view_name in views else record


def _write_kept(folder: StageFolder, should_write: Callable[[Path, int], bool]) -> list[Path]:
    """Write the view of a stage's accepted records, unless it is up to date."""
    view = BY_NAME[folder.name].view
    if view is None:
        return []
    path = folder.out_dir / view
    marks = _marks(folder)
    if not should_write(path, sum(mark["records"] for mark in marks)):
        return []
    state = _read_state(folder.out_dir)
    digest = digest_of([mark["digest"] for mark in marks])
    if path.exists() and state.get(path.name) == [digest, path.stat().st_size]:
        return []
    with atomic_writer(path, alone=True) as file:
        for record in folder.records():
            file.write(to_line(_without_candidates(record)))
    _set_state(folder.out_dir, {**state, path.name: [digest, path.stat().st_size]})
    return [path]


def _write_rejected(out_dir: Path, should_write: Callable[[Path, int], bool]) -> list[Path]:
    """Append the rejected records of finished stages.

    Records of a repeated stage and the following ones are cut off first, because all stages share
    the file."""
    path = out_dir / REJECTED
    stages: list[tuple[StageFolder, str]] = []
    records = 0
    for stage in ORDER:
        folder = StageFolder(out_dir, stage.name)
        marks = _marks(folder)
        if marks and folder.done():
            stages.append((folder, digest_of([mark.get("rejected_digest") for mark in marks])))
            records += sum(sum(mark["rejected"].values()) for mark in marks)
    if not should_write(path, records):
        return []
    state = _read_state(out_dir)
    written: list[list[Any]] = []  # [stage, digest, its end in the file]
    size = path.stat().st_size if path.exists() else 0
    for (folder, digest), previous in zip(stages, state.get(REJECTED, ()), strict=False):
        if previous[:2] != [folder.name, digest] or previous[2] > size:
            break
        written.append(previous)
    end = written[-1][2] if written else 0
    if len(written) == len(stages) and size == end and path.exists():
        return []
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(end)
        file.seek(end)
        for folder, digest in stages[len(written) :]:
            _append_rejected(file, folder)
            written.append([folder.name, digest, file.tell()])
        file.flush()
        os.fsync(file.fileno())
    _set_state(out_dir, {**state, REJECTED: written})
    return [path]


def _append_rejected(file: IO[bytes], folder: StageFolder) -> None:
    for index in range(folder.shards() or 0):
        if folder.rejected(index).exists():
            with open_lines(folder.rejected(index)) as source:
                while chunk := source.read(1 << 20):
                    file.write(chunk)


def _without_candidates(record: Record) -> Record:
    """Return the record without candidates, which are stored separately."""
    return {key: value for key, value in record.items() if key != "candidates"}


def _marks(folder: StageFolder) -> list[dict[str, Any]]:
    marks = (folder.mark(index) for index in range(folder.shards() or 0))
    return [mark for mark in marks if mark is not None]


def _read_state(out_dir: Path) -> dict[str, Any]:
    """Return the state of the views; empty if it was lost, so that they are written again."""
    try:
        state = parse_json((out_dir / _STATE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _set_state(out_dir: Path, state: dict[str, Any]) -> None:
    write_atomic(out_dir / _STATE, to_line(state), alone=True)
