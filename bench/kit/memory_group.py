"""Creates a memory cgroup for one process, as `mem_limit` of Docker Compose does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup folder of the kernel.

    peak_file: the file with the peak memory in bytes.
    """

    folder: Path
    peak_file: str

    def enter_and_run(self, *command: str) -> list[str]:
        """Return the command line of a process that enters the group before anything else."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *command]

    def peak_bytes(self) -> int:
        """Return the peak memory so far."""
        return int((self.folder / self.peak_file).read_text())


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """Create a group of at most `limit` bytes without swap; yield None if that is not possible
    (no such controller, or no right to it).
    """
    name = f"scorekit-bench-{os.getpid()}-{time.monotonic_ns()}"
    limits: tuple[tuple[str, int], ...]
    if (_V1 / "memory.limit_in_bytes").exists():
        folder, peak = _V1 / name, "memory.max_usage_in_bytes"
        limits = (("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit))
    else:
        folder, peak = _V2 / name, "memory.peak"
        limits = (("memory.max", limit), ("memory.swap.max", 0))
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            (folder / limits[0][0]).write_text(f"{limits[0][1]}")
            with contextlib.suppress(OSError):  # a kernel that does not count swap
                (folder / limits[1][0]).write_text(f"{limits[1][1]}")
            group = MemoryGroup(folder, peak) if (folder / peak).exists() else None
        except OSError:
            group = None
        yield group
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(100):  # the kernel needs a moment after the last process
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.1)
