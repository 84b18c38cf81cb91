"""Check that commands as users start them end a mistake with one line and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kits import forked

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "command",
    [
        "scorekit score --url http://127.0.0.1:9 {nowhere} {out}",
        "trainer check --config {nowhere}",
        "trainer train --config {folder}",
        "trainer report {nowhere}",
        "synth run --config {nowhere} --stage all",
        "synth estimate --config {folder}",
        "services.judge --rubrics {nowhere}",
        "demo --run-dir {file}/x",
        "demo.llm_server --model {nowhere}",
        "demo.madlad_shard {file}/x",
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    paths = {"nowhere": tmp_path / "no/x", "out": tmp_path / "out", "folder": tmp_path}
    args = [part.format(**paths, file=tmp_path / "file") for part in command.split()]
    done = forked.run([sys.executable, "-m", *args], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "error: " in done.stderr
