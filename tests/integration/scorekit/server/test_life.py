"""Test a service as a process: start, refusal, log, end by an error; see test_life_end.py for
signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from testing.servers import PATIENCE_S, free_port, wait_ready, wait_until
from tests.kits import forked
from tests.kits.service_process import FAKE, ROOT, fake_service, is_up, post


def _suppressed(call):
    with contextlib.suppress(httpx.HTTPError):
        call()


def test_while_loading_the_service_lives_but_is_not_ready(tmp_path):
    with fake_service(loads_when=tmp_path / "go") as (_, url):
        wait_until(lambda: is_up(url))
        assert httpx.get(f"{url}/health/ready").status_code == 503
        for refused in (post(url, 1), httpx.get(f"{url}/v1/info")):
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["message"] == "the model is loading"
        (tmp_path / "go").touch()
        wait_ready(url)
        assert post(url, 1).status_code == 200


def test_a_model_that_does_not_load_ends_the_process():
    error = "from scorekit.errors import UserError; raise UserError('x.ckpt: no weights')"
    with fake_service(load_extra=error) as (process, _):
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "error: x.ckpt: no weights" in stderr.splitlines()
        assert "Traceback" not in stderr
    with fake_service(load_extra="raise KeyError('a bug')") as (process, _):
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "loading_failed" in stderr and "KeyError" in stderr


def test_logs_are_json_lines_with_the_request_id_and_without_the_text():
    with fake_service() as (process, url):
        wait_ready(url)
        httpx.post(
            f"{url}/v1/score",
            json={"samples": [{"src": "VERY SECRET", "mt": "m"}]},
            headers={"X-Request-Id": "abc"},
        )
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert any(line.get("id") == "abc" and line["status"] == 200 for line in lines)
    assert "SECRET" not in stderr


def test_a_librarys_warning_is_a_json_line_too():
    code = (
        "import warnings; from scorekit.server.run import prepare_process; "
        "prepare_process('info'); warnings.warn('is old')"
    )
    result = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = map(json.loads, result.stderr.splitlines())
    assert "UserWarning: is old" in line["event"] and line["level"] == "warning"


def test_neither_keys_nor_texts_reach_the_log_when_things_go_wrong():
    """Check that tracebacks do not show the locals of their frames."""
    code = FAKE.format(loads_when="/", answers_when="/", batch_s=0, load_extra="pass", then="pass")
    port = free_port()
    process = forked.Popen(
        [sys.executable, "-c", code, "--port", str(port), "--cache", "memory"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"SCOREKIT_API_KEYS": "TOPSECRETKEY"},
    )
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer TOPSECRETKEY"}
    wait_ready(url)
    sample = {"src": "CONFIDENTIAL", "mt": "poison"}
    answer = httpx.post(f"{url}/v1/score", json={"samples": [sample] * 3}, headers=headers)
    assert answer.json()["results"][0]["error"]["type"] == "model_failure"
    # A client that closes in the middle.
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(
            b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer TOPSECRETKEY\r\n"
            b"Content-Length: 999\r\n\r\n{CONFIDENTIAL"
        )
        time.sleep(0.2)
    wait_until(lambda: 'status="499"' in httpx.get(f"{url}/metrics", headers=headers).text)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert "model_failure" in stderr and "RuntimeError" in stderr and "poisoned batch" not in stderr
    assert "TOPSECRETKEY" not in stderr and "CONFIDENTIAL" not in stderr


def test_a_dead_model_thread_ends_the_process_with_1():
    death = "self.forward = lambda batch: exit('the driver is gone')"
    with fake_service(then=death) as (process, url):
        wait_ready(url)
        _suppressed(lambda: post(url, 1))
        assert process.wait(PATIENCE_S) == 1


def _refusal(module, *flags, **environment):
    result = forked.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize("module", ["services.metricx", "services.xcomet"])
def test_a_missing_model_folder_is_one_line(module):
    assert _refusal(module, "--model", "/no/such/model") == (
        "error: --model /no/such/model: no such folder\n"
    )


def test_a_checkpoint_of_another_architecture_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    stderr = _refusal("services.metricx", "--model", str(tmp_path))
    assert stderr.count("\n") == 1
    assert "model_type is 'bert'; MetricX-24 is an 'mt5' checkpoint" in stderr


def test_settings_from_flags_environment_and_their_faults(tmp_path):
    assert "--port (METRICX_PORT): Input should be" in _refusal(
        "services.metricx", METRICX_PORT="x"
    )
    assert "unrecognized arguments: --modle" in _refusal("services.metricx", "--modle", "x")
    assert "overflow float16" in _refusal("services.metricx", "--dtype", "float16")
    golden = str(ROOT / "tests/golden/metricx_tiny")
    assert "can be reached by others" in _refusal(
        "services.metricx", "--host", "0.0.0.0", "--port", str(free_port()), "--model", golden
    )


def test_a_port_in_use_is_one_line():
    with fake_service() as (_, url):
        wait_ready(url)
        port = url.rsplit(":", 1)[1]
        golden = str(ROOT / "tests/golden/metricx_tiny")
        stderr = _refusal("services.metricx", "--port", port, "--model", golden)
        assert f"--port {port}: Address already in use" in stderr
