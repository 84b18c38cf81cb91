"""Calls of `probe.py` from tests: the environment of verl is another than that of the tests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.flaky_server import FAULTS, Fault, FlakyServer
from testing.servers import PATIENCE_S, running_app, wait_ready
from tests.kits.real_tokenizers import write_tokenizer

ROOT = Path(__file__).parents[4]
VERL = ROOT / ".venv-verl/bin/python"
#: Settings of a client that gives up within seconds.
IMPATIENT = {"timeout_s": 2.0, "deadline_s": 6.0}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def probe(folder: Path, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the results of calls of functions of `probe.py` by name."""
    tokenizer = write_tokenizer("qwen3", folder / "tokenizer")
    (folder / "calls.json").write_text(
        json.dumps({"tokenizer": str(tokenizer), "calls": dict(calls)})
    )
    process = subprocess.run(
        [VERL, "-W", "ignore", "-m", "tests.kits.trainer.verl.probe", folder / "calls.json"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


def fault_of(text: str) -> Fault | None:
    """Return the failure that a text asks for: it begins with a name of FAULTS and a colon."""
    name = text.partition(":")[0]
    return next((failure for failure in FAULTS if failure == name), None)


@contextmanager
def failing_by_text(backend: FakeBackend) -> Iterator[tuple[str, FlakyServer]]:
    """Serve a backend whose requests fail as their texts ask for. See `fault_of`."""

    def mood(path: str, body: str) -> Fault | None:
        if path != "/v1/score":
            return None
        samples = [TranslationSample.model_validate(s) for s in json.loads(body)["samples"]]
        return next(filter(None, (fault_of(sample.mt) for sample in samples)), None)

    settings = ServiceSettings(cache="memory", stall_after=PATIENCE_S)
    flaky = FlakyServer(create_app(backend, settings), mood)
    with running_app(flaky) as url:
        wait_ready(url)
        backend.batches.clear()  # those of the warm-up
        try:
            yield url, flaky
        finally:
            flaky.recover()
