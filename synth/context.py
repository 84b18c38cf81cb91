"""One call of the command, what a stage is, and what is checked before one begins."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scorekit.errors import ScorekitError, UserError
from synth.config import SynthConfig
from synth.locks import held
from synth.record import Kept, Rejected
from synth.stats import StageStats
from synth.store import Record, StageFolder, digest_of
from synth.views import outputs

if TYPE_CHECKING:
    from synth.tools import Tools


class Unfinished(ScorekitError):
    """Records are left open: their services failed. Exit code 3; `--resume` asks again."""

    def __init__(self, stage: str, open_: Counter[str]) -> None:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(open_.items()))
        super().__init__(
            f"{stage}: {open_.total()} records are left open ({codes}): --resume asks again, "
            "--resume --give-up rejects what is still not answered"
        )
        self.stage = stage
        self.open = open_


@dataclass(slots=True)
class Context:
    """One call of the command.

    inputs: folder in which a stage finds the one before it, where its own has none (a dry run).
    limit: records of the input that are taken at most, over all shards.
    share: take every shard that nobody is at, not only this process's own, and wait for the others.
    left_open: by shard, 1 where a process of this call has left records open, and so do the others.
    give_up: reject what a service still does not answer, in place of leaving it open.
    advance: called with the number of records done, for a progress bar.
    tell: called with a line for the user.
    """

    cfg: SynthConfig
    out_dir: Path
    inputs: Path | None = None
    resume: bool = False
    overwrite: bool = False
    limit: int | None = None
    shard_id: int = 0
    num_shards: int = 1
    share: bool = False
    give_up: bool = False
    left_open: MutableSequence[int] | None = None
    advance: Callable[[int, int | None], None] = lambda done, total: None
    tell: Callable[[str], None] = lambda line: None
    stats: StageStats = field(default_factory=StageStats)

    def folder(self, stage: str) -> StageFolder:
        """What a stage of this run writes."""
        return StageFolder(self.out_dir, stage)

    def input_of(self, stage: Stage) -> StageFolder:
        """What the stage before it wrote. Raises UserError where there is nothing."""
        assert stage.after is not None
        own = self.folder(stage.after)
        if own.manifest() is None and self.inputs is not None:
            own = StageFolder(self.inputs, stage.after)
        if own.shards() is None:
            raise UserError(f"{own.path}: nothing there; run --stage {stage.after} first")
        return own


class Stage(Protocol):
    """What all stages have. `settings`: the part of the config that its output depends on."""

    @property
    def name(self) -> str: ...

    @property
    def after(self) -> str | None: ...

    def settings(self, cfg: SynthConfig) -> dict[str, Any]: ...


class MapStage(Stage, Protocol):
    """A stage of one record at a time. uses: of "teacher", "metricx", "judge"."""

    def uses(self, cfg: SynthConfig) -> frozenset[str]: ...

    async def process(self, record: Record, tools: Tools) -> Kept | Rejected: ...


class WholeStage(Stage, Protocol):
    """A stage that has to see all records. It writes its shards, marks and manifest."""

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None: ...


def begin(stage: Stage, later: list[str], ctx: Context) -> dict[str, Any]:
    """Check what is there against what is asked; the manifest to work under.

    later: names of the stages after this one, which `overwrite` clears too. Raises UserError.
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
        folders = [ctx.folder(name) for name in (stage.name, *later)]
        with held([(each.lock(), False) for each in folders], "clear it"):
            clear(ctx, stage.name, later)
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


def clear(ctx: Context, stage: str, later: list[str]) -> None:
    """Delete what a stage and those after it have written, the last stage first: whatever stands
    when this is killed was made of what stands. A stage's own view or export stays until the new
    one takes its place."""
    for name in reversed(later):
        for path in outputs(ctx.out_dir, name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        ctx.folder(name).clear()
    ctx.folder(stage).clear()


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
