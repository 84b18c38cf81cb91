"""Test `python -m scorekit score`: early results outlive the run that requested them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.server.fake import FakeBackend
from testing.servers import Held, running_service, wait_until
from tests.kits import forked

SAMPLES = [{"id": f"n{i}", "src": f"s{i}", "mt": f"m{i}"} for i in range(100)]
#: Small enough that a batch holds only some samples of a request.
BATCH_TOKENS = 24


class Stuck(Held):
    """Count the answers; while held, block at the text `stuck`."""

    def __init__(self) -> None:
        super().__init__("xcomet")
        self.answered = 0

    def forward(self, batch):
        if any("stuck" in encoded.payload.mt for encoded in batch):
            return super().forward(batch)
        self.answered += len(batch)
        return FakeBackend.forward(self, batch)


@pytest.fixture
def paths(tmp_path):
    """Return (input, output, early results)."""
    lines = [json.dumps(sample) + "\n" for sample in SAMPLES]
    lines[97] = json.dumps(SAMPLES[97] | {"mt": "stuck"}) + "\n"
    (tmp_path / "in.jsonl").write_text("".join(lines))
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.early"


def count(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def score(url, *arguments):
    return CliRunner().invoke(app, ["score", "--url", url, *map(str, arguments)])


def interrupted(url, source, out, early):
    """Kill a run that had saved most results, and had none in its output."""
    command = [sys.executable, "-m", "scorekit", "score", "--url", url, source, out]
    child = forked.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: count(early) >= 90)
    child.kill()
    child.wait()
    assert count(out) == 0


def test_a_run_that_is_killed_within_its_first_request_keeps_what_came(paths, tmp_path):
    source, out, early = paths
    backend = Stuck()
    backend.hold()
    with running_service(backend, max_batch_tokens=BATCH_TOKENS) as url:
        interrupted(url, *paths)
        saved = count(early)
        backend.go.set()
    new_service = Stuck()  # another process with an empty cache
    with running_service(new_service, max_batch_tokens=BATCH_TOKENS) as url:
        new_service.answered = 0
        result = score(url, source, out)
        assert result.exit_code == 0, result.stderr
        assert new_service.answered <= len(SAMPLES) - saved and not early.exists()
        assert score(url, source, tmp_path / "whole.jsonl").exit_code == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_came_early_of_another_job_is_not_taken(paths, tmp_path):
    source, out, _ = paths
    backend = Stuck()
    backend.hold()
    with running_service(backend, max_batch_tokens=BATCH_TOKENS) as url:
        interrupted(url, *paths)
        backend.go.set()
        for flags in ("--overlong", "error"), ("--overwrite",):
            backend.answered = 0
            result = score(url, source, out, *flags)
            assert result.exit_code == 0 and count(out) == len(SAMPLES), result.stderr
            out.write_bytes(b"")
