"""Ask a service with the HTTP client of Java's own library, which offers HTTP/2 by an upgrade."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from testing.servers import JSON, PATIENCE_S
from tests.kits.server_kinds import KINDS, Answer

CLIENT = Path(__file__).parents[3] / "data/java/Client.java"


@pytest.mark.skipif(
    not (shutil.which("java") and shutil.which("javac")), reason="no JDK: java and javac"
)
def test_a_stock_java_client_gets_the_score_of_any_other(tmp_path):
    # Longer than what a connection reads at once.
    body = json.dumps({"samples": [{"src": "a " * 40_000, "mt": "안녕하세요."}]}).encode()
    (tmp_path / "body.json").write_bytes(body)
    with KINDS["metricx"].run() as url:
        command = ["java", str(CLIENT), f"{url}/v1/score", str(tmp_path / "body.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        expected = httpx.post(f"{url}/v1/score", content=body, headers=JSON)
    assert expected.status_code == 200
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [status for status, _, _ in lines] == ["200"] * 3
    for _, _, text in lines:
        answer = Answer(200, {}, text.encode())
        assert answer.json() == Answer(200, {}, expected.content).json()
