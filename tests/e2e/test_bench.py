"""Every benchmark that takes minutes runs to its end in small, and gives a number a question."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A module, and the files that it writes.
BENCHES = {
    "bench": ("serving", "ray_serve", "scoring", "trl_step", "offsets", "reward_wait"),
    "bench.filters": ("filters",),
    "bench.judge_upstream": ("judge_upstream",),
    "bench.llm_client": ("llm_client",),
    "bench.synth.driver": ("synth_driver",),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", BENCHES)
def test_a_benchmark_runs_in_small(module):
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in BENCHES[module]:
        path = ROOT / "runs/bench" / f"{name}.json"
        assert path.stat().st_mtime >= begun - 1, f"{path} is an older one"
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["quick"] and found["figures"]
        for figure in found["figures"]:
            assert figure["value"] is not None and math.isfinite(figure["value"]), figure
