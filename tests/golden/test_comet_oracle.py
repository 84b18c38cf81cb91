"""Compare our networks with unbabel-comet's, both as services (`make test-oracle`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from scorekit.processes import end_with_parent
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import REF, loaded, score
from testing.servers import free_port, running_service, wait_ready
from tests.integration.demo.test_xcomet_training import train
from tests.kits.comet import golden as comet_golden

ROOT = comet_golden.ROOT
ORACLE = ROOT / ".venv-oracle/bin/python"
#: The required tolerance, in float32 on both sides; the largest difference so far was 5e-7.
CLOSE = 1e-5
#: One of each class and form, and every way from layers to an embedding.
NAMES = [*comet_golden.FAMILY, "xcomet_mix", "xcomet_patched", "xcomet_lite", "demo"]

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not ORACLE.exists(), reason="no .venv-oracle: `make env-oracle` makes it"),
]


def _flags(folder: Path, port: int) -> list[str]:
    flags = ["--implementation", "unbabel-comet", "--model", str(folder), "--device", "cpu"]
    return [*flags, "--threads", "1", "--port", str(port), "--cache", "memory"]


def _start(*arguments: str) -> subprocess.Popen[str]:
    """Start a module in the oracle's environment."""
    return subprocess.Popen(
        [ORACLE, "-W", "ignore", "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent(),
    )


@pytest.fixture(scope="module")
def loaded_upstream() -> Iterator[IO[str]]:
    """Yield the input of a process that has loaded unbabel-comet, and forks services."""
    with _start("tests.kits.comet.upstream_services") as process:
        assert process.stdin
        yield process.stdin


@contextmanager
def upstream_service(folder: Path, loaded_upstream: IO[str]) -> Iterator[str]:
    """Yield the URL of `services.xcomet --implementation unbabel-comet` in its environment."""
    port = free_port()
    print(json.dumps(_flags(folder, port)), file=loaded_upstream, flush=True)
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        print(file=loaded_upstream, flush=True)


@contextmanager
def upstream_command(folder: Path) -> Iterator[str]:
    """Yield the URL of the same service, started as users start it."""
    port = free_port()
    with _start("services.xcomet", *_flags(folder, port)) as process:
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _results(url: str, rows: list[dict[str, str]]) -> list[dict]:
    options = {"span_offsets": "upstream", "empty_ref": "text"}
    body = {"samples": [{"src": "", **row} for row in rows], "options": options}
    return httpx.post(f"{url}/v1/score", json=body, timeout=180).json()["results"]


def _spans(result: dict) -> list[tuple]:
    return [
        (s["start"], s["end"], s["severity"], s["text"]) for s in result.get("error_spans") or []
    ]


@pytest.mark.parametrize("name", NAMES)
def test_both_services_say_the_same(name, tmp_path, loaded_upstream):
    folder = comet_golden.build(name, tmp_path)
    is_forked = name != "demo"  # one is started as users start it
    upstream = upstream_service(folder, loaded_upstream) if is_forked else upstream_command(folder)
    rows = comet_golden.rows(name)
    backend = XCometBackend(str(folder), device="cpu", threads=1)
    with running_service(backend, cache="memory") as url, upstream as other:
        wait_ready(url)
        own_results, upstream_results = _results(url, rows), _results(other, rows)
        versions = [
            httpx.get(f"{base_url}/v1/info").json()["versions"] for base_url in (url, other)
        ]
    for row, own_result, upstream_result in zip(rows, own_results, upstream_results, strict=True):
        assert own_result["score"] == pytest.approx(upstream_result["score"], abs=CLOSE), row
        assert _spans(own_result) == _spans(upstream_result), row
        assert own_result["tokens"] == upstream_result["tokens"]
    assert [base_url["comet"] for base_url in versions] == [None, "2.2.7"]


def test_upstream_loads_what_the_demo_exports(tmp_path, monkeypatch):
    """Load it with `strict`, and compare its predictions with our scores."""
    folder = tmp_path / "model"
    train(folder, monkeypatch)
    rows = [*REF[:10]]
    code = (
        "import comet, json, sys\n"
        "model = comet.load_from_checkpoint("
        "'checkpoints/model.ckpt', local_files_only=True, strict=True)\n"
        "said = model.predict("
        "json.load(sys.stdin), gpus=0, progress_bar=False, num_workers=0)\n"
        "print(json.dumps(said.scores))"
    )
    done = subprocess.run(
        [ORACLE, "-W", "ignore", "-c", code],
        input=json.dumps(rows),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    upstream_scores = json.loads(done.stdout.splitlines()[-1])
    own_scores = [result.score for result in score(loaded(folder), rows)]
    assert own_scores == pytest.approx(upstream_scores, abs=CLOSE)


def test_upstream_predicts_the_goldens(tmp_path):
    """Check the files of `comet/` against upstream's results today, for one checkpoint."""
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from tests.golden.recompute_comet import predictions\n"
        "from tests.kits.float64 import float64\n"
        "torch.set_num_threads(1)\n"
        "with float64():\n"
        "    print(json.dumps(predictions('all_three_tags', Path(sys.argv[1]))))"
    )
    result = subprocess.run(
        [ORACLE, "-W", "ignore", "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    anew = json.loads(result.stdout.splitlines()[-1])
    stored = comet_golden.read("all_three_tags")
    assert anew["weights"] == stored["weights"]
    assert anew["scores"] == pytest.approx(stored["scores"], abs=1e-9)
    assert [[s[:4] for s in row_spans] for row_spans in anew["spans"]] == [
        [s[:4] for s in row_spans] for row_spans in stored["spans"]
    ]
