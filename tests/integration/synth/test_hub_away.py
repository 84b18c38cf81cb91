"""Check that a hub that is away, or lost while files are read, is one clear line."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from testing.servers import free_port
from tests.kits import forked
from tests.kits.synth.output import ROOT

#: The libraries wait between their retries; the waits are left out.
_NO_WAITS = "import runpy, sys, time; time.sleep = lambda seconds: None; "


def python(code, *arguments, endpoint, home):
    """Run code in a process that sees the hub at `endpoint`, and without its pauses."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_test"}
    return forked.run(
        [sys.executable, "-c", _NO_WAITS + code, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def synth(*arguments, endpoint, home):
    code = "runpy.run_module('synth', run_name='__main__', alter_sys=True)"
    return python(code, *arguments, endpoint=endpoint, home=home)


@pytest.mark.parametrize("command", [["check"], ["run", "--stage", "sample_sources"]])
def test_a_hub_that_is_away_is_one_line(command, tmp_path):
    done = synth(
        *command,
        *("--config", "configs/synth/seed.yaml", "--set", f"run.out_dir={tmp_path / 'run'}"),
        endpoint=f"http://127.0.0.1:{free_port()}",
        home=tmp_path / "home",
    )
    assert "Traceback" not in done.stderr + done.stdout
    assert "name local shards in data.files" in done.stderr
    if command == ["check"]:  # with its other rows
        assert done.returncode != 0 and "teacher.prompt" in done.stdout + done.stderr
    else:
        assert done.returncode == 2


class _Hub(BaseHTTPRequestHandler):
    """Lists one file, and closes the connection in the middle of its content."""

    protocol_version = "HTTP/1.1"
    content = b"".join(json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(2000))

    def log_message(self, *_):
        """Print nothing."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_json(self.entries())

    def entries(self):
        return [{"type": "file", "path": "a.jsonl", "size": len(self.content), "oid": "0" * 40}]

    def send_json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self):
        if "/resolve/" in self.path:
            self.send_response(206 if self.headers.get("Range") else 200)
            self.send_header("Content-Length", str(len(self.content)))
            self.send_header("ETag", '"a"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(self.content[: len(self.content) // 2])
                self.close_connection = True
        elif "/tree/" in self.path:
            self.send_json(self.entries())
        else:
            repo = {"id": "a/b", "sha": "0" * 40, "siblings": [], "tags": [], "private": False}
            self.send_json(repo | {"downloads": 0, "likes": 0})


@contextmanager
def losing_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("url", ["hf://datasets/a/b/a.jsonl", "{endpoint}/resolve/a.jsonl"])
def test_a_connection_that_is_lost_while_documents_are_read_is_one_line(url, tmp_path):
    code = (
        "from scorekit.errors import UserError\n"
        "from synth.sources import madlad\n"
        "try:\n"
        "    for document in madlad._remote(madlad._parsed, sys.argv[1], print): pass\n"
        "except UserError as error:\n"
        "    print('refused:', error)\n"
    )
    with losing_hub() as endpoint:
        done = python(
            code, url.format(endpoint=endpoint), endpoint=endpoint, home=tmp_path / "home"
        )
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1 and "go on with --resume" in refused[0], done.stdout
