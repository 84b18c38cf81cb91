"""Check and clear a stage's folder before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_temporaries
from scorekit.locks import hold_locks
from synth.config import SynthConfig
from synth.execution.stage import Stage, StageWork
from synth.storage.shares import ShardShare
from synth.storage.store import StageFolder, digest_of


def prepare_stage(
    stage: Stage,
    later: Sequence[Stage],
    work: StageWork,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Compare the existing output with the requested settings; return the stage's manifest.

    later: the following stages, which `overwrite` also clears.
    Raises UserError.
    """
    requested = requested_manifest(stage, work.cfg, work.out_dirs, work.limit)
    if overwrite:
        if work.share.num_shards > 1:
            raise UserError(
                "--overwrite clears what all machines have made: delete "
                f"{work.folder.path} and the later stages yourself, then start the "
                "machines without it"
            )
        out_dir = work.folder.out_dir
        locks = [(StageFolder(out_dir, cleared.name).lock(), False) for cleared in (stage, *later)]
        with hold_locks(locks, "clear it"):
            clear(out_dir, stage, later)
    return continued_manifest(work.folder, requested, work.share, resume=resume)


def requested_manifest(
    stage: Stage, cfg: SynthConfig, out_dirs: Sequence[Path], limit: int | None
) -> dict[str, Any]:
    """Return the manifest of a stage by its config and input. Raises UserError without input.

    out_dirs: folders that may have the input.
    """
    input_manifest = stage.input_of(out_dirs).manifest() if stage.after else None
    requested: dict[str, Any] = {
        "stage": stage.name,
        "settings": stage.settings(cfg),
        "input": input_manifest["digest"] if input_manifest else None,
        "limit": limit,
    }
    return {**requested, "digest": digest_of(requested)}


def continued_manifest(
    folder: StageFolder, requested: dict[str, Any], share: ShardShare, *, resume: bool
) -> dict[str, Any]:
    """Return the manifest that a stage continues with: that of its output, if it has some.

    Raises UserError if it must not continue that output."""
    existing = folder.manifest()
    if existing is None:
        return requested
    if not resume and _has_output(folder, share):
        raise UserError(f"{folder.path}: has output already; give --resume or --overwrite")
    if existing["digest"] != requested["digest"]:
        raise UserError(
            f"{folder.path}: was begun with other settings: {_difference(existing, requested)}; "
            "give --overwrite, or the old ones"
        )
    return existing


def check_begun(
    folder: StageFolder, source: StageFolder | None, manifest: Mapping[str, Any]
) -> None:
    """Raise UserError if another process has cleared the stage or its input since `prepare_stage`.

    It is called under the locks that prevent clearing."""
    now = folder.manifest()
    before = source.manifest_digest() if source is not None else None
    if before != manifest["input"] or (now is not None and now["digest"] != manifest["digest"]):
        raise UserError(f"{folder.path}: another process has cleared it meanwhile; --resume")
    remove_temporaries(folder.path.parent, folder.name)  # left by a killed clearing


def clear(out_dir: Path, stage: Stage, later: Sequence[Stage]) -> None:
    """Delete the output of a stage and the following ones, the last stage first.

    So after a kill, all remaining output still has its input. The stage's own view or export stays
    until it is replaced."""
    for later_stage in reversed(later):
        for path in (out_dir / name for name in later_stage.output_files):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        StageFolder(out_dir, later_stage.name).clear()
    StageFolder(out_dir, stage.name).clear()


def _has_output(folder: StageFolder, share: ShardShare) -> bool:
    shards = folder.shards()
    if not shards:  # started, but the number is unknown: other machines may be working
        return share.num_shards == 1
    return any(folder.mark(i) for i in share.assigned(shards))


def _difference(existing: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    old, new = dict(_flat(existing)), dict(_flat(requested))
    changed = [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and key not in ("digest", "shards", "layout")
    ]
    return "; ".join(changed[:5]).replace("settings.", "") or "its input has changed"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
