"""Install the wheel in an empty environment, and use it in a folder that has names of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.servers import free_port, wait_until
from tests.kits.service_process import is_up

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UV = [sys.executable, "-m", "uv"]
SERVICES = ("metricx", "xcomet", "judge", "embedder", "retriever", "reward-model")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Of the source archive: a wheel of the tree takes files that an earlier build has left there.
    subprocess.run([*UV, "build", "-q", "-o", str(folder), str(ROOT)], check=True, env=shell())
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment that has the wheel without an extra."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [*UV, "venv", "-q", "--python", sys.executable, str(folder)], check=True, env=shell()
    )
    install(folder, str(wheel))
    return folder


def shell() -> dict[str, str]:
    """Return the variables that the tests were started with, as far as uv needs them."""
    prefix = "SHELLS_"
    variables = {name: os.environ[name] for name in os.environ if name.startswith(prefix)}
    return os.environ | {name.removeprefix(prefix): value for name, value in variables.items()}


def install(environment: Path, *requirements: str) -> None:
    python = str(environment / "bin/python")
    constraints = str(ROOT / "constraints.txt")
    command = [*UV, "pip", "install", "-q", "-p", python, "-c", constraints, *requirements]
    subprocess.run(command, check=True, env=shell())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a package and a module of the names of ours."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services/__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "trainer.py").write_text("raise SystemExit('not ours')")
    yield tmp_path


def scorekit(environment: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as it was installed."""
    command = [str(environment / "bin/scorekit"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_what_needs_no_extra_works_and_what_does_names_it(
    environment: Path, wheel: Path, folder: Path
) -> None:
    assert scorekit(environment, folder, "--version").stdout.startswith("scorekit ")
    for words in (
        [],
        ["score"],
        ["meta-eval"],
        ["fetch"],
        ["serve"],
        *(["serve", name] for name in SERVICES),
        ["ingest"],
        ["adapter", "openrlhf"],
        *([name] for name in ("train", "sft", "evaluate", "check", "export", "report", "reward")),
        ["roleplay"],
        ["search"],
        ["synth"],
        ["synth", "run"],
    ):
        done = scorekit(environment, folder, *words, "--help")
        assert (done.returncode, done.stderr) == (0, ""), words
        assert "usage: scorekit" in done.stdout.lower()
    for task in ("translation", "roleplay", "search", "synth"):
        assert scorekit(environment, folder, "init", task, f"{task}.yaml").returncode == 0
    for words, package, extra in (
        (["fetch"], "huggingface-hub", "metricx"),
        (["serve", "judge"], "structlog", "judge"),
        (["ingest", "x.pdf", "--index", "x"], "numpy", "retriever"),
        (["synth", "check", "--config", "x"], "langcodes", "synth"),
    ):
        done = scorekit(environment, folder, *words)
        assert done.returncode == 2
        requirement = f'"scorekit[{extra}] @ file://{wheel}"'
        line = f"error: {package} is not installed: pip install {requirement}"
        assert done.stderr.splitlines() == [line]


def test_the_line_of_a_missing_extra_installs_it(environment: Path, folder: Path) -> None:
    """Do what the error says, serve rules as a judge, and score a file."""
    error = scorekit(environment, folder, "serve", "judge").stderr
    install(environment, error.partition('pip install "')[2].partition('"')[0])
    port = free_port()
    words = ["--backend", "rules", "--cache", "memory", "--port", str(port)]
    rows = folder / "in.jsonl"
    row = {"id": 7, "source_text": "A house.", "candidate": "집이다."}
    row |= {"source_lang": "English", "target_lang": "Korean"}
    rows.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    command = [str(environment / "bin/scorekit"), "serve", "judge", *words]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_up(url))
            task = ["--task", "translation_filter"]
            done = scorekit(environment, folder, "score", "--url", url, *task, "in.jsonl", "-")
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
    assert done.returncode == 0, done.stderr + log
    assert done.stdout.startswith('{"line":1,"id":7,"ok":true,"score":')
    assert process.returncode == 0
