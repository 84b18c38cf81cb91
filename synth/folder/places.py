"""Where a run lies: in a folder that is its own, on a file system that gives locks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import UserError
from synth.config import SynthConfig, answers_place
from synth.folder.store import REJECTED, StageFolder
from synth.stages.table import ORDER

_MOUNTS = Path("/proc/self/mountinfo")
#: File systems that several machines may see.
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "afs",
    "ocfs2",
    "gfs2",
    "virtiofs",
)
#: Options of a mount under which a lock is told to nobody else.
_LOCAL_LOCKS = frozenset(
    {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock", "noflock"}
)


def is_run(out_dir: Path) -> bool:
    """Whether a stage was begun there."""
    return any(StageFolder(out_dir, stage.name).path.exists() for stage in ORDER)


def need_run(out_dir: Path) -> None:
    """Raise UserError where no stage was begun: to find nothing wrong there would mislead."""
    if not is_run(out_dir):
        raise UserError(f"{out_dir}: no run here (no stage was begun)")


def check_claim(out_dir: Path) -> None:
    """Return if `claim` would make the folder; nothing is made. Raises UserError."""
    _refuse_foreign(out_dir)
    parent = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(f"run.out_dir: {out_dir}: {parent} is no folder that may be written to")


def claim(out_dir: Path) -> None:
    """Make the folder of a run, before anything is written there. Raises UserError for a folder
    that is no run's and holds what a run would write over, and for one that may not be used."""
    _refuse_foreign(out_dir)
    try:
        _locks(out_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.out_dir: {out_dir}: {error.strerror}") from None


def _locks(out_dir: Path) -> Path:
    return StageFolder(out_dir, ORDER[0].name).lock().parent


def _refuse_foreign(out_dir: Path) -> None:
    names = {"config.yaml", "stats.json", "logs.txt", REJECTED}
    names.update(name for stage in ORDER for name in stage.leaves)
    written = {out_dir / name for name in names}
    try:
        there = sorted(path.name for path in written if _holds_something(path))
        # Looked at after them: another driver that begins makes it first.
        if there and not _locks(out_dir).exists() and not is_run(out_dir):
            raise UserError(
                f"run.out_dir: {out_dir}: holds {', '.join(there)}, and no run was begun there: it "
                "would be written over: name a new folder"
            )
    except OSError as error:
        raise UserError(f"run.out_dir: {out_dir}: {error.strerror}") from None


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    place: Path
    kind: str
    options: frozenset[str]


def warnings(cfg: SynthConfig, out_dir: Path) -> Iterator[str]:
    """What a user of several machines has to know, before they write over one another."""
    mount = mount_of(out_dir)
    if mount is not None and _has_local_locks(mount):
        yield (
            f"{out_dir} lies on {mount.kind}, whose locks may be of each machine alone: let one "
            "machine work there at a time, or each at its own shards (--stage, --shard-id)"
        )
    place = answers_place(cfg)
    mount = None if "://" in place else mount_of(Path(place))
    if mount is not None and mount.kind.startswith(_NETWORK):
        yield (
            f"{place} lies on {mount.kind}: SQLite is for one machine; where several work, name a "
            "Redis in run.answers"
        )


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """What a path lies on; None where the system does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = path.absolute()
    found = [mount for mount in map(_mount, lines) if mount and path.is_relative_to(mount.place)]
    # of equal ones the later lies on top
    return max(reversed(found), key=lambda mount: len(mount.place.parts), default=None)


def _mount(line: str) -> Mount | None:
    own, _, rest = line.partition(" - ")
    fields, kind = own.split(" "), rest.split(" ")
    if len(fields) < 6 or len(kind) < 3:
        return None
    place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
    return Mount(Path(place), kind[0], frozenset((fields[5] + "," + kind[2]).split(",")))


def _has_local_locks(mount: Mount) -> bool:
    if mount.kind.startswith("fuse"):
        return True  # a file system of a program passes locks on only where the program does
    return mount.kind.startswith(_NETWORK) and bool(mount.options & _LOCAL_LOCKS)
