"""Test `python -m scorekit fetch` against a small hub on a real port."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHA = "0123456789abcdef0123456789abcdef01234567"
BIG = bytes(range(256)) * 4096  # 1 MiB
CHECKPOINT = bytes(range(255)) * 100_000  # 25 MB: the client writes parts of 10 MB
MODELS: dict[str, dict[str, bytes]] = {
    "google/metricx-24-hybrid-tiny": {
        "config.json": b"{}",
        "pytorch_model.bin": BIG,
        "README.md": b"x",
        "model.msgpack": BIG,
    },
    "google/mt5-xl": {"spiece.model": b"pieces", "config.json": b"{}", "pytorch_model.bin": BIG},
    "Unbabel/XCOMET-tiny": {
        "hparams.yaml": b"pretrained_model: facebook/encoder",
        "checkpoints/model.ckpt": CHECKPOINT,
        "README.md": b"x",
    },
    "facebook/encoder": {"config.json": b"{}", "sentencepiece.bpe.model": b"p", "model.bin": BIG},
    "Unbabel/XCOMET-gated": {"hparams.yaml": b"x: 1"},
    "some/policy": {"config.json": b"{}", "model.safetensors": b"weights"},
}


@dataclass
class Hub:
    """A small hub.

    requests: (method, path, Range).
    cut_after: bytes of a body before it breaks off;
    cuts: how many bodies break off, None: all."""

    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut_after: int | None = None
    cuts: int | None = None


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self) -> None:
            state.requests.append((self.command, self.path, self.headers.get("Range")))
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts == ["api", "agent-harnesses"]:
                self.body(b"{}")
                return
            if parts[:2] == ["api", "models"]:
                files = MODELS.get("/".join(parts[2:4]))
                if files is None:
                    self.refuse(401, "RepoNotFound")  # the hub gives both the same answer
                    return
                if parts[4:5] == ["tree"]:
                    tree = [
                        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                        for name, data in files.items()
                    ]
                    self.body(json.dumps(tree).encode())
                    return
                info = {
                    "id": "/".join(parts[2:4]),
                    "sha": SHA,
                    "siblings": [{"rfilename": name} for name in files],
                }
                self.body(json.dumps(info).encode())
                return
            model, name = "/".join(parts[:2]), "/".join(parts[4:])
            if model.endswith("gated"):
                self.refuse(403, "GatedRepo")
                return
            self.body(MODELS[model][name])

        def body(self, data: bytes) -> None:
            start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "GET":
                sent = data[start:]
                if state.cut_after is not None and len(sent) > state.cut_after and state.cuts != 0:
                    state.cuts = None if state.cuts is None else state.cuts - 1
                    self.wfile.write(sent[: state.cut_after])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return
                self.wfile.write(sent)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()


def fetch(
    hub: Hub, home: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scorekit", "fetch", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_ETAG_TIMEOUT": "5",
        }
        | environment,
    )


def files(home: Path, model: str) -> set[str]:
    folder = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / SHA
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_metricx_comes_with_its_tokenizer_and_without_what_is_not_read(
    hub: Hub, tmp_path: Path
) -> None:
    result = fetch(hub, tmp_path, "google/metricx-24-hybrid-tiny")
    assert result.returncode == 0, result.stderr
    assert files(tmp_path, "google/metricx-24-hybrid-tiny") == {"config.json", "pytorch_model.bin"}
    assert files(tmp_path, "google/mt5-xl") == {"spiece.model"}
    assert "google/mt5-xl" in result.stdout and "0.00 GB" in result.stdout


def test_xcomet_comes_with_its_encoders_settings(hub: Hub, tmp_path: Path) -> None:
    result = fetch(hub, tmp_path, "Unbabel/XCOMET-tiny", "some/policy")
    assert result.returncode == 0, result.stderr
    file_names = files(tmp_path, "Unbabel/XCOMET-tiny")
    assert file_names == {"hparams.yaml", "checkpoints/model.ckpt"}
    assert files(tmp_path, "facebook/encoder") == {"config.json", "sentencepiece.bpe.model"}
    assert files(tmp_path, "some/policy") == {"config.json", "model.safetensors"}


def test_with_no_model_named_it_brings_what_the_services_are_told_to_load(
    hub: Hub, tmp_path: Path
) -> None:
    models = {
        "METRICX_MODEL": "google/metricx-24-hybrid-tiny",
        "XCOMET_MODEL": "Unbabel/XCOMET-tiny",
    }
    models["EMBEDDER_MODEL"] = models["REWARD_MODEL_MODEL"] = "some/policy"
    result = fetch(hub, tmp_path, **models)
    assert result.returncode == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "google/metricx-24-hybrid-tiny",
        "google/mt5-xl",
        "Unbabel/XCOMET-tiny",
        "facebook/encoder",
        *["some/policy"] * 2,
    ]


def test_what_was_fetched_is_there_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, "Unbabel/XCOMET-tiny").returncode == 0
    before = len(hub.requests)
    offline = fetch(hub, tmp_path, "Unbabel/XCOMET-tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(hub.requests) == before
    missing = fetch(hub, tmp_path, "google/metricx-24-hybrid-tiny", HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert "HF_HUB_OFFLINE is set: run `scorekit fetch" in missing.stderr
    assert "Traceback" not in missing.stderr


def starts(hub: Hub) -> list[int]:
    """Return the first byte of each request for the checkpoint."""
    ranges = [
        range_header
        for method, path, range_header in hub.requests
        if method == "GET" and path.endswith("model.ckpt")
    ]
    return [int((range_header or "bytes=0-")[6:].split("-")[0]) for range_header in ranges]


def test_a_broken_connection_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts = 15_000_000, 1
    result = fetch(hub, tmp_path, "Unbabel/XCOMET-tiny")
    assert result.returncode == 0, result.stderr
    assert next((tmp_path / "hub").rglob("model.ckpt")).read_bytes() == CHECKPOINT
    first, second = starts(hub)
    assert first == 0 and second >= 10_000_000


def test_a_download_that_was_given_up_keeps_its_whole_files(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after = 2_000_000  # no other file is as long as the checkpoint
    broken = fetch(hub, tmp_path, "Unbabel/XCOMET-tiny")
    assert broken.returncode == 2 and "Traceback" not in broken.stderr
    assert "the same command keeps the complete files" in broken.stderr
    assert not list((tmp_path / "hub").rglob("model.ckpt"))
    hub.cut_after = None
    hub.requests.clear()
    assert fetch(hub, tmp_path, "Unbabel/XCOMET-tiny").returncode == 0
    assert next((tmp_path / "hub").rglob("model.ckpt")).read_bytes() == CHECKPOINT
    gets = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert not any(path.endswith("hparams.yaml") for path in gets)


def test_a_gated_model_names_the_page_to_visit(hub: Hub, tmp_path: Path) -> None:
    result = fetch(hub, tmp_path, "Unbabel/XCOMET-gated")
    assert result.returncode == 2
    assert "licence has to be accepted" in result.stderr
    assert f"{hub.url}/Unbabel/XCOMET-gated" in result.stderr
    assert "HF_TOKEN" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_model_and_a_wrong_token_are_told_apart_as_far_as_the_hub_does(
    hub: Hub, tmp_path: Path
) -> None:
    result = fetch(hub, tmp_path, "no/such", HF_TOKEN="")
    assert (
        result.returncode == 2 and "HF_TOKEN is not set, or there is no such model" in result.stderr
    )
    with_token = fetch(hub, tmp_path, "no/such", HF_TOKEN="hf_wrong")
    assert "HF_TOKEN is wrong, or there is no such model" in with_token.stderr
    assert "hf_wrong" not in with_token.stderr + with_token.stdout
    two = fetch(hub, tmp_path, "a/b", "c/d", "--revision", "r")
    assert two.returncode == 2 and "--revision" in two.stderr
