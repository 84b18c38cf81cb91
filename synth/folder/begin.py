"""What is checked before a stage begins, and what is cleared for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_temporaries
from synth.context import Context, Stage
from synth.folder.locks import held
from synth.folder.store import StageFolder, digest_of


def begin(stage: Stage, later: Sequence[Stage], ctx: Context) -> dict[str, Any]:
    """Check what is there against what is asked; the manifest to work under.

    later: the stages after this one, which `overwrite` clears too. Raises UserError.
    """
    folder = ctx.folder(stage.name)
    before = ctx.input_of(stage).manifest() if stage.after else None
    wanted: dict[str, Any] = {
        "stage": stage.name,
        "settings": stage.settings(ctx.cfg),
        "input": before["digest"] if before else None,
        "limit": ctx.limit,
    }
    wanted["digest"] = digest_of(wanted)
    if ctx.overwrite:
        if ctx.num_shards > 1:
            raise UserError(
                "--overwrite clears what all machines have made: delete "
                f"{folder.path} and the later stages yourself, then start the machines without it"
            )
        folders = [ctx.folder(each.name) for each in (stage, *later)]
        with held([(each.lock(), False) for each in folders], "clear it"):
            clear(ctx, stage, later)
    found = folder.manifest()
    if found is None:
        return wanted
    if not ctx.resume and _has_output(folder, ctx):
        raise UserError(f"{folder.path}: has output already; give --resume or --overwrite")
    if found["digest"] != wanted["digest"]:
        raise UserError(
            f"{folder.path}: was begun with other settings: {_difference(found, wanted)}; "
            "give --overwrite, or the old ones"
        )
    return found


def check_begun(stage: Stage, manifest: Mapping[str, Any], ctx: Context) -> None:
    """Return if nobody has cleared or begun anew the stage or its input since `begin`: called under
    the locks that forbid it. Raises UserError."""
    folder = ctx.folder(stage.name)
    now = folder.manifest()
    before = ctx.input_of(stage).manifest_digest() if stage.after else None
    if before != manifest["input"] or (now is not None and now["digest"] != manifest["digest"]):
        raise UserError(f"{folder.path}: another process has cleared it meanwhile; --resume")
    remove_temporaries(folder.path.parent, stage.name)  # of a clearing that was killed: it had both


def clear(ctx: Context, stage: Stage, later: Sequence[Stage]) -> None:
    """Delete what a stage and those after it have written, the last stage first: whatever stands
    when this is killed was made of what stands. A stage's own view or export stays until the new
    one takes its place."""
    for each in reversed(later):
        for path in (ctx.out_dir / name for name in each.leaves):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        ctx.folder(each.name).clear()
    ctx.folder(stage.name).clear()


def _has_output(folder: StageFolder, ctx: Context) -> bool:
    shards = folder.shards()
    if not shards:  # begun, and not known yet: other machines may be at it
        return ctx.num_shards == 1
    return any(folder.mark(i) for i in own_shards(shards, ctx))


def own_shards(shards: int, ctx: Context) -> range:
    """The shards that this process works on, whatever others do."""
    return range(ctx.shard_id, shards, ctx.num_shards)


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    old, new = dict(_flat(found)), dict(_flat(wanted))
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
