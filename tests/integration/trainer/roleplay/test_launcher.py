"""The embedder that a run starts for a folder of weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.kit.servers import PATIENCE_S
from scorekit.client.embeddings import Embeddings
from scorekit.errors import ServiceUnreachable, UserError
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.training.launcher import embedder_of

ROOT = Path(__file__).parents[4]


def test_a_folder_is_served_until_the_run_is_over(tmp_path):
    pytest.importorskip("sentence_transformers")
    from bench.embeddings.folders import make_folder

    folder = make_folder(tmp_path / "model", seed=0, max_length=32, pooling="cls")
    log = tmp_path / "run/embedder.log"
    with embedder_of(RewardConfig(embedding_model=str(folder)), log) as url:
        assert url is not None
        with Embeddings(url) as client:
            assert client.info().pooling == "cls"
            assert len(client.embed(["안녕"])[0]) == client.info().dimension
    with Embeddings(url, deadline_s=0.5) as client, pytest.raises(ServiceUnreachable):
        client.info()
    assert '"listening"' in log.read_text()


def test_a_url_starts_nothing(tmp_path):
    with embedder_of(RewardConfig(embedding_model="http://127.0.0.1:9"), tmp_path / "log") as url:
        assert url is None
    assert not (tmp_path / "log").exists()


def test_a_folder_that_is_none_or_no_model_is_one_line(tmp_path):
    nowhere = RewardConfig(embedding_model=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no such folder"), embedder_of(nowhere, tmp_path / "log"):
        pass
    (tmp_path / "empty").mkdir()
    empty = RewardConfig(embedding_model=str(tmp_path / "empty"))
    with (
        pytest.raises(UserError, match="its embedder ended") as caught,
        embedder_of(empty, tmp_path / "log"),
    ):
        pass
    assert "\n" not in str(caught.value)


def gone(pid):
    """Whether a process runs no more; one that nobody has waited for is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel does it")
def test_what_a_run_starts_ends_with_it_however_it_ends():
    code = (
        "import subprocess, sys, time\n"
        "from trainer.runs.leaving import mortal\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleeper, start_new_session=True, preexec_fn=mortal())\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert not gone(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + PATIENCE_S
        while not gone(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if not gone(child):
            os.kill(child, signal.SIGKILL)
        parent.stdout.close()
