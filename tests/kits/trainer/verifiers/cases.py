"""Calls of `probe.py` from tests, which run in another environment than verifiers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
VERIFIERS = ROOT / ".venv-verifiers/bin/python"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def probe(folder: Path, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the results of calls of functions of `probe.py` by name."""
    (folder / "calls.json").write_text(json.dumps(dict(calls)), encoding="utf-8")
    process = subprocess.run(
        [
            VERIFIERS,
            *("-W", "ignore", "-m", "tests.kits.trainer.verifiers.probe"),
            folder / "calls.json",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results
