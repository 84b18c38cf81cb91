"""A service as a process: start, refuse, drain, exit."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.servers import PATIENCE_S, free_port, wait_ready, wait_until

ROOT = Path(__file__).parents[2]
#: A service with a slow fake in place of a model, run the way the real ones are.
#: It loads, and answers others than its warm-up, once the files named here exist.
FAKE = """
import time
from pathlib import Path
from scorekit.server.fake import FakeBackend
from scorekit.server.run import main
from scorekit.server.settings import ServiceSettings

class Slow(FakeBackend):
    answers_when = Path("/")

    def load(self):
        while not Path({loads_when!r}).exists():
            time.sleep(0.01)
        {load_extra}
        return super().load()

    def encode(self, samples, options):
        if not samples[0].src.startswith("word "):  # not the warm-up's
            self.seconds_per_batch = {batch_s}
            self.answers_when = Path({answers_when!r})
            {then}
        return super().encode(samples, options)

    def forward(self, batch):
        while not self.answers_when.exists():
            time.sleep(0.01)
        return super().forward(batch)

main(ServiceSettings, lambda s: Slow(poison='poison'))
"""


@contextlib.contextmanager
def fake_service(
    *flags, loads_when="/", answers_when="/", batch_s=0.0, load_extra="pass", then="pass"
):
    port = free_port()
    code = FAKE.format(
        loads_when=str(loads_when), answers_when=str(answers_when), batch_s=batch_s,
        load_extra=load_extra, then=then,
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--port", str(port), "--cache", "memory", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def _post(url, i, **kwargs):
    return httpx.post(f"{url}/v1/score", json={"samples": [{"src": str(i), "mt": "m"}]}, **kwargs)


def _up(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/live").status_code == 200
    return False


def test_sigterm_answers_what_was_accepted_refuses_what_is_new_and_exits_0(tmp_path):
    with fake_service(answers_when=tmp_path / "go") as (process, url):
        wait_ready(url)
        accepted = []
        threads = [
            threading.Thread(target=lambda i=i: accepted.append(_post(url, i, timeout=PATIENCE_S)))
            for i in range(3)
        ]
        [t.start() for t in threads]
        wait_until(lambda: "scorekit_queue_items 3.0" in httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        refused = _post(url, "new")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["type"] == "unavailable"
        assert httpx.get(f"{url}/health/live").status_code == 200
        (tmp_path / "go").touch()
        [t.join() for t in threads]
        assert [r.json()["results"][0]["ok"] for r in accepted] == [True] * 3
        assert process.wait(PATIENCE_S) == 0


def test_an_idle_service_ends_at_once():
    with fake_service("--drain-s", "3600") as (process, url):
        wait_ready(url)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0  # long before what accepted work would be given


def test_accepted_work_may_not_hold_the_end_for_ever():
    with fake_service("--drain-s", "0.3", batch_s=3600) as (process, url):
        wait_ready(url)
        with _asked(url) as answers:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 1  # work was lost
        _check_shut_down(answers[0])


def test_a_second_signal_ends_without_waiting():
    with fake_service(batch_s=3600) as (process, url):
        wait_ready(url)
        with _asked(url) as answers:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 1
        _check_shut_down(answers[0])


@pytest.mark.parametrize("name", ["metricx", "xcomet"])
def test_a_model_that_computes_for_clients_that_have_left_does_not_abort_the_end(name):
    """A thread that comes back from torch while the interpreter ends calls C++'s terminate."""
    port = free_port()
    model = str(ROOT / "demo/models" / name)
    process = subprocess.Popen(
        [sys.executable, "-m", f"services.{name}", "--model", model, "--port", str(port),
         "--cache", "memory", "--threads", "1", "--max-batch-tokens", "8192"],
        stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, 120)
        leave_work_behind(url, count=1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def leave_work_behind(url, count=1):
    """A client asks for so many long samples, and leaves while the model has some of them."""
    samples = [{"src": f"{i} and a house on the hill", "mt": "집 " * 40} for i in range(count)]
    body = json.dumps({"samples": samples}).encode()
    with _connect(url) as client:
        client.sendall(
            b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        client.sendall(body)
        wait_until(lambda: re.search("scorekit_queue_items [1-9]", _metrics(url)))
        if count > 1:  # a first batch is done: the model has the next one
            wait_until(lambda: not re.search("scorekit_tokens_total 0.0", _metrics(url)))
    wait_until(lambda: 'status="499"' in _metrics(url))


def _metrics(url):
    return httpx.get(f"{url}/metrics", timeout=60).text


def test_a_batch_that_hangs_is_left_behind():
    with fake_service(batch_s=600) as (process, url):
        wait_ready(url)
        leave_work_behind(url)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0  # nothing was owed to anybody
    last = json.loads(stderr.splitlines()[-1])
    assert (last["event"], last["threads"]) == ("threads_left_behind", ["model"])


def test_a_signal_while_threads_are_waited_for_ends_at_once():
    with fake_service(batch_s=600) as (process, url):
        wait_ready(url)
        leave_work_behind(url)
        process.send_signal(signal.SIGTERM)
        lines = iter(process.stderr.readline, "")
        assert any("Waiting for application shutdown" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "threads_left_behind" not in process.stderr.read()


@contextlib.contextmanager
def _asked(url):
    """A request is in the model during the block; gives the list that gets its answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(_post(url, 1, timeout=PATIENCE_S)))
    thread.start()
    wait_until(lambda: "scorekit_queue_items 1.0" in httpx.get(f"{url}/metrics").text)
    yield answers
    thread.join()


def _check_shut_down(answer):
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "the service is shutting down"


def test_a_half_sent_request_does_not_hold_the_end():
    with fake_service() as (process, url):
        wait_ready(url)
        head = b"POST /v1/score HTTP/1.1\r\nHost: x\r\n"
        with _connect(url) as in_head, _connect(url) as in_body, _connect(url):
            in_head.sendall(head)
            in_body.sendall(head + b"Content-Length: 999\r\n\r\n{")
            # The service's loop takes connections in order: it has seen the others by now.
            assert httpx.get(f"{url}/health/live").status_code == 200
            process.send_signal(signal.SIGTERM)
            for connection in (in_head, in_body):
                assert connection.recv(65536).startswith(b"HTTP/1.1 503")
            assert process.wait(PATIENCE_S) == 0


def test_an_open_stream_is_sent_to_its_end():
    with fake_service("--max-batch-tokens", "16", batch_s=0.3) as (process, url):
        wait_ready(url)
        samples = [{"src": f"{i} b c d e f g", "mt": "m n o p q r s t"} for i in range(5)]
        with httpx.stream("POST", f"{url}/v1/score/stream", json={"samples": samples}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last) == {"done": True, "ok": 5, "failed": 0}
        assert process.wait(PATIENCE_S) == 0


def test_a_slow_reader_gets_all_of_an_answer_that_was_due():
    samples = [{"id": f"{i}".ljust(1200), "src": f"{i}", "mt": "m"} for i in range(10_000)]
    body = json.dumps({"samples": samples}).encode()
    head = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with fake_service() as (process, url):
        wait_ready(url)
        with _connect(url) as reader:
            reader.sendall(head + body)
            answer = reader.recv(1000)  # the answer has begun; most of it waits in the service
            process.send_signal(signal.SIGTERM)
            time.sleep(2.0)
            while part := reader.recv(2**20):
                answer += part
        body = _body_of(answer)
        assert len(body) > 10_000 * 1200  # more than the kernel keeps for us
        assert len(json.loads(body)["results"]) == 10_000
        assert process.wait(PATIENCE_S) == 0


def _connect(url):
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return connection


def _body_of(answer):
    """The body of an answer as it came over the wire, put together from its chunks."""
    wire = SimpleNamespace(makefile=lambda _: io.BytesIO(answer))
    response = http.client.HTTPResponse(wire)
    response.begin()
    return response.read()


def _suppressed(call):
    with contextlib.suppress(httpx.HTTPError):
        call()


def test_while_loading_the_service_lives_but_is_not_ready(tmp_path):
    with fake_service(loads_when=tmp_path / "go") as (_, url):
        wait_until(lambda: _up(url))
        assert httpx.get(f"{url}/health/ready").status_code == 503
        for refused in (_post(url, 1), httpx.get(f"{url}/v1/info")):
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["message"] == "the model is loading"
        (tmp_path / "go").touch()
        wait_ready(url)
        assert _post(url, 1).status_code == 200


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


def test_neither_keys_nor_texts_reach_the_log_when_things_go_wrong():
    """Tracebacks must not show the locals of their frames."""
    code = FAKE.format(loads_when="/", answers_when="/", batch_s=0, load_extra="pass", then="pass")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--port", str(port), "--cache", "memory"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"SCOREKIT_API_KEYS": "TOPSECRETKEY"},
    )  # fmt: skip
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer TOPSECRETKEY"}
    wait_ready(url)
    sample = {"src": "CONFIDENTIAL", "mt": "poison"}
    answer = httpx.post(f"{url}/v1/score", json={"samples": [sample] * 3}, headers=headers)
    assert answer.json()["results"][0]["error"]["type"] == "model_failure"
    with socket.create_connection(("127.0.0.1", port)) as half:  # a client that breaks off
        half.sendall(
            b"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOPSECRETKEY\r\n"
            b"Content-Length: 999\r\n\r\n{CONFIDENTIAL"
        )
        time.sleep(0.2)
    wait_until(lambda: 'status="499"' in httpx.get(f"{url}/metrics", headers=headers).text)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert "model_failure" in stderr and "RuntimeError" in stderr and "poisoned batch" not in stderr
    assert "TOPSECRETKEY" not in stderr and "CONFIDENTIAL" not in stderr


def test_sigterm_while_the_model_loads_ends_the_process(tmp_path):
    with fake_service(loads_when=tmp_path / "never") as (process, url):
        wait_until(lambda: _up(url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_dead_model_thread_ends_the_process_with_1():
    death = "self.forward = lambda batch: exit('the driver is gone')"
    with fake_service(then=death) as (process, url):
        wait_ready(url)
        _suppressed(lambda: _post(url, 1))
        assert process.wait(PATIENCE_S) == 1


def _refusal(module, *flags, **environment):
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


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
