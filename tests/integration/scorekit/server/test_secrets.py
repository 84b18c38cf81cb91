"""Check that keys are visible nowhere, and that a log has no texts of samples."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from testing.servers import JSON, free_port, wait_ready
from tests.kits import forked

ROOT = Path(__file__).parents[4]
KEY, FILE_KEY, TEXT = "KEY-from-the-environment", "KEY-from-a-file", "CONFIDENTIAL"
#: A service in which one id is a bug, one text a model failure, and one a tokenizer failure.
SERVICE = """
import scorekit.server.app as app
from scorekit.server.fake import FakeBackend
from scorekit.server.run import main
from scorekit.server.settings import ServiceSettings

read_request = app.read_request

async def with_a_bug(*args):
    asked = await read_request(*args)
    text = asked.samples[0].src
    return asked if asked.samples[0].id != "bug" else asked.no_such_field

class Backend(FakeBackend):
    def encode(self, samples, options):
        texts = [sample.mt for sample in samples]
        assert not any("untokenisable" in text for text in texts)
        return super().encode(samples, options)

app.read_request = with_a_bug
main(ServiceSettings, lambda settings: Backend(poison="poison"))
"""


@contextlib.contextmanager
def _service(code, tmp_path, *flags):
    """Yield the process, its URL, and a client with a key."""
    keys, port = tmp_path / "keys", free_port()
    keys.write_text(f"\n  {FILE_KEY}  \n\n")
    keys.chmod(0o600)
    process = forked.Popen(
        [
            sys.executable,
            "-c",
            code,
            "--port",
            str(port),
            "--cache",
            "memory",
            "--api-keys-file",
            str(keys),
            "--log-level",
            "debug",
            *flags,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"SCOREKIT_API_KEYS": f"other, {KEY}"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def _end(process):
    process.send_signal(signal.SIGTERM)
    output = "".join(process.communicate(timeout=180))
    assert process.returncode == 0, output
    return output


def _score(client, id="a", src=TEXT, mt="m", **more):
    return client.post(
        "/v1/score",
        json={"samples": [{"id": id, "src": src, "mt": mt}], **more},
        headers={"X-Request-Id": f"request-{id}"},
    )


def test_no_text_of_a_sample_reaches_the_log_whatever_happens_to_it(tmp_path):
    with _service(SERVICE, tmp_path, "--max-field-chars", "50") as (process, client):
        wait_ready(client.base_url)
        outcomes = {
            mt: _score(client, id=f"s{i}", mt=mt).json()["results"][0].get("error", {}).get("type")
            for i, mt in enumerate(
                [
                    f"{TEXT} m",
                    f"{TEXT}\0",
                    f"{TEXT} nan",
                    f"{TEXT} poison",
                    f"{TEXT} untokenisable",
                    TEXT * 9,
                ]
            )
        }
        expected = [None, "invalid_input", "non_finite", "model_failure", "model_failure"]
        assert list(outcomes.values()) == [*expected, "invalid_input"]
        assert _score(client, id="bug").status_code == 500
        assert _score(client, id="option", options={TEXT: TEXT}).status_code == 422
        assert _score(client, src=[TEXT]).status_code == 422
        for body in (f"{TEXT} no json", f'{{"{TEXT}": 1}}', f'["{TEXT}'):
            assert client.post("/v1/score", content=body, headers=JSON).status_code == 422
        assert client.get(f"/v1/{TEXT}?src={TEXT}").status_code == 404
        output = _end(process)
    assert TEXT not in output
    lines = [json.loads(line) for line in output.splitlines()]
    events = [line["event"] for line in lines if line.get("id") == "request-bug"]
    assert events == ["bug", "request"]
    assert "no_such_field" in output and "poisoned batch" in output  # --log-level debug prints all


def test_keys_are_seen_nowhere(tmp_path):
    with _service(SERVICE, tmp_path) as (process, client):
        wait_ready(client.base_url)
        answers = [
            client.get("/v1/info"),
            client.get("/openapi.json"),
            client.get("/metrics"),
            client.get("/nowhere"),
            _score(client),
            _score(client, id="bug"),
            client.get("/v1/info", headers={"Authorization": f"Bearer {FILE_KEY}"}),
            client.get("/v1/info", headers={"Authorization": f"Bearer {KEY}x"}),
        ]
        assert [a.status_code for a in answers] == [200, 200, 200, 404, 200, 500, 200, 401]
        outputs = [f"{a.headers}{a.text}" for a in answers]
        outputs.append(Path(f"/proc/{process.pid}/cmdline").read_text())
        outputs.append(_end(process))
    assert not any("KEY-from" in text for text in outputs)


@pytest.mark.parametrize(
    "code",
    [
        SERVICE.replace("settings: Backend", "settings: 1 / 0 or Backend"),
        SERVICE.replace("def encode", "def load(self):\n        1 / 0\n    def encode"),
        SERVICE.replace("read_request = app", "app.Gate = 1 / 0; read_request = app"),
    ],
    ids=["no backend", "no model", "no import"],
)
def test_a_crash_at_the_start_shows_no_key(tmp_path, code):
    with _service(code, tmp_path) as (process, _):
        output = "".join(process.communicate(timeout=180))
    assert process.returncode == 1 and "ZeroDivisionError" in output
    assert "KEY-from" not in output


def test_a_key_file_that_everyone_can_read_is_told(tmp_path):
    keys = tmp_path / "open-keys"
    keys.write_text("k")
    keys.chmod(0o644)
    with _service(SERVICE, tmp_path, "--api-keys-file", str(keys)) as (process, client):
        wait_ready(client.base_url)
        lines = [json.loads(line) for line in _end(process).splitlines()]
    (warning,) = [line for line in lines if line["level"] == "warning"]
    assert warning["event"] == "key_file_readable_by_everyone" and warning["path"] == str(keys)
