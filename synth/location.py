"""The folder of a run: it must be unused by others, on a file system with locks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scorekit.errors import UserError
from synth.config import SynthConfig, answers_place
from synth.stages.table import ORDER
from synth.storage.store import REJECTED, StageFolder

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
#: Mount options under which locks are local to a machine.
_LOCAL_LOCKS = frozenset(
    {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock", "noflock"}
)


def is_run(out_dir: Path) -> bool:
    """Return True if a stage was started in the folder."""
    return any(StageFolder(out_dir, stage.name).path.exists() for stage in ORDER)


def need_run(out_dir: Path) -> None:
    """Raise UserError if no stage was started there, for example for a wrong path."""
    if not is_run(out_dir):
        raise UserError(f"{out_dir}: no run here (no stage was started)")


def check_claim(out_dir: Path) -> None:
    """Raise UserError if `create_run_dir` would fail. Nothing is created."""
    _refuse_foreign(out_dir)
    parent = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(f"run.out_dir: {out_dir}: {parent} is not a writable folder")


def create_run_dir(out_dir: Path) -> None:
    """Create the folder of a run.

    Raises UserError if a foreign folder has files that a run would overwrite, or if the folder
    cannot be used."""
    _refuse_foreign(out_dir)
    try:
        _locks(out_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.out_dir: {out_dir}: {error.strerror}") from None


def _locks(out_dir: Path) -> Path:
    return StageFolder(out_dir, ORDER[0].name).lock().parent


def _refuse_foreign(out_dir: Path) -> None:
    names = {"config.yaml", "stats.json", "logs.txt", REJECTED}
    names.update(name for stage in ORDER for name in stage.output_files)
    written = {out_dir / name for name in names}
    try:
        existing = sorted(path.name for path in written if _has_content(path))
        # Checked afterwards, because a starting driver creates the locks first.
        if existing and not _locks(out_dir).exists() and not is_run(out_dir):
            raise UserError(
                f"run.out_dir: {out_dir}: has {', '.join(existing)}, but not from a run. They "
                "would be overwritten. Name a new folder"
            )
    except OSError as error:
        raise UserError(f"run.out_dir: {out_dir}: {error.strerror}") from None


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    path: Path
    kind: str
    options: frozenset[str]


def warnings(cfg: SynthConfig, out_dir: Path) -> Iterator[str]:
    """Yield warnings about file systems on which several machines could overwrite each other."""
    mount = mount_of(out_dir)
    if mount is not None and _has_local_locks(mount):
        yield (
            f"{out_dir} is on {mount.kind}, whose locks may be local to each machine. Use one "
            "machine at a time, or give each its own shards (--stage, --shard-id)"
        )
    answers_location = answers_place(cfg)
    mount = None if "://" in answers_location else mount_of(Path(answers_location))
    if mount is not None and mount.kind.startswith(_NETWORK):
        yield (
            f"{answers_location} is on {mount.kind}: SQLite is for one machine. For several, "
            "name a Redis in run.answers"
        )


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """Return the mount of a path; None if the system does not list mounts."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = path.absolute()
    matches = [mount for mount in map(_mount, lines) if mount and path.is_relative_to(mount.path)]
    # of equal mount points the later one is on top
    return max(reversed(matches), key=lambda mount: len(mount.path.parts), default=None)


def _mount(line: str) -> Mount | None:
    mount_part, _, device_part = line.partition(" - ")
    fields, kind = mount_part.split(" "), device_part.split(" ")
    if len(fields) < 6 or len(kind) < 3:
        return None
    mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
    return Mount(Path(mount_point), kind[0], frozenset((fields[5] + "," + kind[2]).split(",")))


def _has_local_locks(mount: Mount) -> bool:
    if mount.kind.startswith("fuse"):
        return True  # FUSE file systems may not support locks between machines
    return mount.kind.startswith(_NETWORK) and bool(mount.options & _LOCAL_LOCKS)
