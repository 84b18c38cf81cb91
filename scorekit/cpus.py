"""How many processors there are to be used."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs that this process may really use: its affinity, capped by a cgroup v2 or v1 quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            words += Path(period_file).read_text().split() if period_file else []
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0:
            return max(1, min(cpus, quota // period))
    return cpus
