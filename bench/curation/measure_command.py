"""Runs a command of curation on a store, and measures it from inside its process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from bench.sampling import peak_mib
from trainer.search.cli import app


def measure_command(command: str, store: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of a full command, and the peak memory of this process."""
    out = f"{store}-{command}"
    wall, cpu = time.perf_counter(), time.process_time()
    done = CliRunner().invoke(app, [command, "--run", store, "--out", out, *flags])
    assert done.exit_code == 0, done.output
    return {
        "episodes": int(store.rsplit("-", 1)[1]),
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": peak_mib(),
    }
