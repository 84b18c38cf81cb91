"""Test a service whose log cannot be written: it serves, drains and ends as any."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from testing.servers import PATIENCE_S, free_port, wait_ready
from tests.kits.service_process import fake_service, post
from tests.kits.unwritable import BY_NAME, Pipeline, fill

#: For a service whose log is not read: it waits for the reader before each line until it gives up.
QUICK = "import scorekit.streams as s; s.MAX_WAIT_S = s.END_WAIT_S = 0.0"


@pytest.mark.parametrize("unwritable", BY_NAME.values(), ids=BY_NAME)
def test_a_log_that_cannot_be_written_decides_about_nothing(unwritable):
    with (
        unwritable() as stderr,
        fake_service("--log-level", "debug", first=QUICK, stderr=stderr) as (process, url),
    ):
        wait_ready(url)
        assert post(url, "one").json()["results"][0]["ok"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_lost_lines_are_a_line_of_json_once_somebody_reads():
    reader, writer = os.pipe()
    with fake_service("--log-level", "debug", first=QUICK, stderr=writer) as (process, url):
        wait_ready(url)
        fill(writer)
        for number in range(3):
            post(url, number)
        os.read(reader, 2**20)  # now there is room
        post(url, "four")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as log_file:
        first, *events = [json.loads(line) for line in log_file]
    assert (first["event"], first["level"]) == ("log_lines_lost", "warning")
    # The line of the third request may be written only after there is room.
    assert first["lines"] >= 2 and first["reason"] == "its reader does not read"
    assert "draining" in {event["event"] for event in events}


def test_ctrl_c_ends_a_service_behind_tee(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "scorekit.server.fake", "--port", str(port)]
    with Pipeline([*command, "--cache", "memory"], tmp_path) as pipeline:
        wait_ready(f"http://127.0.0.1:{port}")
        assert pipeline.interrupt() == 0
        assert '"event": "listening"' in pipeline.log.read_text()


def test_a_drain_that_fails_still_ends_the_service():
    broken = (
        "import scorekit.server.run as r; "
        "r.log = type('Broken', (), {'info': lambda *a, **k: 1 / 0})()"
    )
    with fake_service(load_extra=broken) as (process, url):
        wait_ready(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
