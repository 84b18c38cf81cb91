"""Test `python -m services.judge` as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from testing.judge import GOOD, judge
from testing.openai_server import FakeOpenAI
from testing.servers import free_port, wait_ready
from tests.kits import forked

ROOT = Path(__file__).parents[4]


def start(*flags, **environment):
    return forked.Popen(
        [sys.executable, "-m", "services.judge", "--cache", "memory", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def ending(process):
    """Return (exit code, stderr) of a process that ends by itself."""
    _, stderr = process.communicate(timeout=180)
    return process.returncode, stderr


def test_without_any_flag_it_judges_by_rules():
    port = free_port()
    process = start("--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        assert httpx.get(f"{url}/v1/info").json()["model"] == "rules"
        assert judge(url, GOOD)[0]["verdict"]["pass"]
        process.send_signal(signal.SIGTERM)
        assert ending(process)[0] == 0
    finally:
        process.kill()


def test_the_upstreams_key_comes_from_the_environment_and_stands_in_no_log():
    fake = FakeOpenAI(api_key="a-secret-key")
    port = free_port()
    with fake.running() as upstream:
        process = start(
            "--port",
            str(port),
            "--backend",
            "openai",
            "--base-url",
            upstream,
            "--model",
            "teacher",
            VLLM_API_KEY="a-secret-key",
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url)
            assert judge(url, GOOD, max_tokens=4096)[0]["ok"]
            assert fake.requests[0].headers["authorization"] == "Bearer a-secret-key"
            process.send_signal(signal.SIGTERM)
            code, log = ending(process)
            assert code == 0 and "a-secret-key" not in log
        finally:
            process.kill()


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "own.yaml").write_text("system: x\n")
    for flags, words in [
        (["--backend", "openai"], "--base-url"),
        (["--backend", "openai", "--base-url", "host:8000", "--model", "m"], "is not the URL"),
        (["--rubrics", str(tmp_path / "none")], "no such folder"),
        (["--rubrics", str(tmp_path)], "own.yaml: "),
        (["--max-concurrency", "0"], "--max-concurrency"),
    ]:
        code, stderr = ending(start(*flags))
        assert code == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
        assert words in stderr


def test_an_upstreams_password_is_refused_on_the_command_line_alone():
    flags = ("--port", "0", "--backend", "openai", "--model", "teacher")
    address = "http://me:hidden@127.0.0.1:9/v1"
    code, stderr = ending(start(*flags, "--base-url", address))
    assert code == 2 and "JUDGE_BASE_URL" in stderr and "hidden" not in stderr
    process = start("--rubrics", "/nowhere", *flags, JUDGE_BASE_URL=address)
    code, stderr = ending(process)
    assert code == 2 and "no such folder" in stderr and "hidden" not in stderr
