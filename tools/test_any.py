"""Run tests as another machine would: other vector units, thread counts, a load, taken ports.

    python -m tools.test_any                  # the numeric tests, every level, 1 and 4 threads
    python -m tools.test_any --load --whole   # all that `make test` runs, once, on a busy machine
    python -m tools.test_any --level oldest --threads 4 -- tests/unit/trainer/rl/test_forward.py -x

Ports 8000 to 8005 are taken meanwhile. A level sets what torch's own kernels, oneDNN and MKL may
use; `oldest` sums as MKL does on a processor that it knows nothing of, which moves float32 results
as far as another vendor's processor does. Exit code 1 where a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scorekit.command import run_command

ROOT = Path(__file__).parents[1]
PORTS = range(8000, 8006)
#: Name: what torch must find for it to run here, and the environment.
LEVELS: dict[str, tuple[str, dict[str, str]]] = {
    "oldest": (
        "DEFAULT",
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    ),
    "avx2": (
        "AVX2",
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    ),
    "avx512": ("AVX512", {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "native": ("DEFAULT", {}),
}
ORDER = ("DEFAULT", "AVX2", "AVX512")
#: What compares numbers that a model has computed.
NUMERIC = (
    "tests/golden",
    "tests/unit/trainer",
    "tests/unit/services/xcomet",
    "tests/unit/services/metricx",
    "tests/unit/bench",
    "tests/integration/services/xcomet/test_checkpoint.py",
    "tests/integration/services/metricx/test_model.py",
    "tests/integration/trainer/runs/test_checkpoint.py",
    "tests/integration/trainer/runs/test_export.py",
    "tests/integration/trainer/rl/policy",
    "tests/integration/trainer/rl/test_world.py",
    "tests/integration/trainer/rl/test_vllm_engine.py",
    "tests/integration/trainer/search/rollout/test_any_policy.py",
    "tests/integration/trainer/search/rollout/test_rounding.py",
    "tests/integration/trainer/search/rollout/test_sampled.py",
    "tests/integration/trainer/search/rollout/test_local_policy.py",
)


def main(arguments: list[str] | None = None) -> int:
    """Run all levels; return 0 if every run passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", action="append", choices=LEVELS, help="default: all of them")
    parser.add_argument("--threads", action="append", type=int, help="default: 1 and 4")
    parser.add_argument("--load", action="store_true", help="keep every core busy meanwhile")
    parser.add_argument("--whole", action="store_true", help="the whole suite, natively, one run")
    parser.add_argument("pytest", nargs="*", help="in place of the numeric tests (behind --)")
    chosen = parser.parse_args(arguments)
    levels = chosen.level or (["native"] if chosen.whole else list(LEVELS))
    threads = chosen.threads or ([1] if chosen.whole else [1, 4])
    tests = chosen.pytest or (["tests"] if chosen.whole else _paths(NUMERIC))
    failed = []
    with taken_ports(), load(os.cpu_count() or 1 if chosen.load else 0):
        for level in levels:
            if ORDER.index(LEVELS[level][0]) > ORDER.index(_capability()):
                print(f"-- {level}: this processor has no {LEVELS[level][0]}, left out", flush=True)
                continue
            for count in threads:
                print(f"-- {level}, {count} threads", flush=True)
                if run(level, count, tests) != 0:
                    failed.append(f"{level}, {count} threads")
    print("failed: " + "; ".join(failed) if failed else "all passed")
    return int(bool(failed))


def run(level: str, threads: int, tests: list[str]) -> int:
    """Run pytest at a level; return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow and not vllm and not oracle and not verl and not verifiers",
            *tests,
        ],
        cwd=ROOT,
        env=environment | LEVELS[level][1] | {"OMP_NUM_THREADS": str(threads)},
    ).returncode


@contextlib.contextmanager
def taken_ports() -> Iterator[None]:
    """Occupy the ports that our services have by default."""
    with contextlib.ExitStack() as stack:
        for port in PORTS:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # taken by a third: as good
                listener.bind(("0.0.0.0", port))
                listener.listen()
        yield


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Start many processes that only count."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _paths(patterns: tuple[str, ...]) -> list[str]:
    return [str(path.relative_to(ROOT)) for p in patterns for path in sorted(ROOT.glob(p))]


if __name__ == "__main__":
    run_command(main)
