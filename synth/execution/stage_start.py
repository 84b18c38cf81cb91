"""Check and clear a stage's folder before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_temporaries
from scorekit.locks import hold_locks
from synth.execution.stage import Stage, StageContext
from synth.storage.store import StageFolder, digest_of


def prepare_stage(stage: Stage, later: Sequence[Stage], ctx: StageContext) -> dict[str, Any]:
    """Compare the existing output with the requested settings; return the stage's manifest.

    later: the following stages, which `overwrite` also clears. Raises UserError.
    """
    requested = requested_manifest(stage, ctx)
    if ctx.overwrite:
        if ctx.num_shards > 1:
            raise UserError(
                "--overwrite clears what all machines have made: delete "
                f"{ctx.folder(stage.name).path} and the later stages yourself, then start the "
                "machines without it"
            )
        folders = [ctx.folder(stage_folder.name) for stage_folder in (stage, *later)]
        with hold_locks([(stage_folder.lock(), False) for stage_folder in folders], "clear it"):
            clear(ctx, stage, later)
    return continued_manifest(stage, requested, ctx)


def requested_manifest(stage: Stage, ctx: StageContext) -> dict[str, Any]:
    """Return the manifest of a stage by its config and input. Raises UserError without input."""
    input_manifest = ctx.input_of(stage).manifest() if stage.after else None
    requested: dict[str, Any] = {
        "stage": stage.name,
        "settings": stage.settings(ctx.cfg),
        "input": input_manifest["digest"] if input_manifest else None,
        "limit": ctx.limit,
    }
    return {**requested, "digest": digest_of(requested)}


def continued_manifest(
    stage: Stage, requested: dict[str, Any], ctx: StageContext
) -> dict[str, Any]:
    """Return the manifest that a stage continues with: that of its output, if it has some.

    Raises UserError if it must not continue that output."""
    folder = ctx.folder(stage.name)
    existing = folder.manifest()
    if existing is None:
        return requested
    if not ctx.resume and _has_output(folder, ctx):
        raise UserError(f"{folder.path}: has output already; give --resume or --overwrite")
    if existing["digest"] != requested["digest"]:
        raise UserError(
            f"{folder.path}: was begun with other settings: {_difference(existing, requested)}; "
            "give --overwrite, or the old ones"
        )
    return existing


def check_begun(stage: Stage, manifest: Mapping[str, Any], ctx: StageContext) -> None:
    """Raise UserError if another process has cleared the stage or its input since `prepare_stage`.

    It is called under the locks that prevent clearing."""
    folder = ctx.folder(stage.name)
    now = folder.manifest()
    before = ctx.input_of(stage).manifest_digest() if stage.after else None
    if before != manifest["input"] or (now is not None and now["digest"] != manifest["digest"]):
        raise UserError(f"{folder.path}: another process has cleared it meanwhile; --resume")
    remove_temporaries(folder.path.parent, stage.name)  # left by a killed clearing


def clear(ctx: StageContext, stage: Stage, later: Sequence[Stage]) -> None:
    """Delete the output of a stage and the following ones, the last stage first.

    So after a kill, all remaining output still has its input. The stage's own view or export stays
    until it is replaced."""
    for later_stage in reversed(later):
        for path in (ctx.out_dir / name for name in later_stage.output_files):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        ctx.folder(later_stage.name).clear()
    ctx.folder(stage.name).clear()


def _has_output(folder: StageFolder, ctx: StageContext) -> bool:
    shards = folder.shards()
    if not shards:  # started, but the number is unknown: other machines may be working
        return ctx.num_shards == 1
    return any(folder.mark(i) for i in own_shards(shards, ctx))


def own_shards(shards: int, ctx: StageContext) -> range:
    """Return the shards assigned to this process."""
    return range(ctx.shard_id, shards, ctx.num_shards)


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
