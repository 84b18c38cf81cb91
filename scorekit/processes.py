"""Processors that may be used, and child processes that end with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from scorekit.streams import protect_streams

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def usable_cpus() -> int:
    """Return the number of CPUs this process may use: its affinity, capped by a cgroup quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            fields = Path(quota_file).read_text().split()
            fields += Path(period_file).read_text().split() if period_file else []
            quota, period = int(fields[0]), int(fields[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0:
            return max(1, min(cpus, quota // period))
    return cpus


def boot_id() -> str:
    """Return a name of this machine since its start. Containers of one machine have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return platform.node()


def end_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` for Popen that makes the kernel send the child SIGTERM when its parent
    dies.

    This works after kill -9 of the parent, too. The kernel watches the thread that starts the
    child: start it from one that lives as long as the process. Returns None if there is no such
    call (not Linux); then a child outlives a killed parent.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)

    return ask_the_kernel


def same_modules() -> dict[str, str]:
    """Return variables with which a child's `python -m` finds the modules that this process finds.

    Without them Python looks in the current folder first: a `services` or `trainer.py` of the user
    there would run in place of ours.
    """
    paths = dict.fromkeys(path or os.getcwd() for path in sys.path)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def end_with_make() -> None:
    """End this process with SIGTERM when the `make` that started it exits.

    Nothing happens if another program started it: a shell may exit before what it started with
    `nohup`.
    """
    if "MAKELEVEL" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_worker_with_parent() -> None:
    """End this worker of `multiprocessing` when its parent exits; call it when the worker starts.

    Ctrl-C is left to the parent, which ends its workers itself. What the worker prints does not
    decide about it.
    """
    protect_streams(stdout_is_log=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
