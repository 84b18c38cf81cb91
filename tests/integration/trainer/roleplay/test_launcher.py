"""Test the embedder that a run starts for a folder of weights."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from scorekit.client.embeddings import Embeddings
from scorekit.errors import ServerEnded, ServiceUnreachable, UserError
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import embedder_of, reach

ROOT = Path(__file__).parents[4]


def test_a_folder_is_served_until_the_run_is_over(tmp_path):
    pytest.importorskip("sentence_transformers")
    from testing.checkpoints.embedder import make_folder

    folder = make_folder(tmp_path / "model", seed=0, max_length=32, pooling="cls")
    log = tmp_path / "run/embedder.log"
    with embedder_of(RewardConfig(embedding_model=str(folder)), log) as server:
        assert server is not None and server.exit_reason() is None
        with Embeddings(server.url) as client:
            assert client.info().pooling == "cls"
            assert len(client.embed(["안녕"])[0]) == client.info().dimension
    with Embeddings(server.url, deadline_s=0.5) as client, pytest.raises(ServiceUnreachable):
        client.info()
    assert '"listening"' in log.read_text()


def test_an_embedder_that_has_ended_is_not_waited_for(tmp_path):
    pytest.importorskip("sentence_transformers")
    from testing.checkpoints.embedder import make_folder

    folder = make_folder(tmp_path / "model", seed=0, max_length=32, pooling="cls")
    log = tmp_path / "embedder.log"
    cfg = RewardConfig(embedding_model=str(folder))
    with embedder_of(cfg, log) as server, closing(reach(cfg, server)) as embedder:
        (pid,) = [c.pid for c in psutil.Process().children() if "services.embedder" in c.cmdline()]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerEnded) as error_info:  # a retry would last 15 minutes
            embedder.embed(["안녕"])
    last_lines = " ".join(log.read_text().splitlines()[-3:])
    assert '"event": "ready"' in last_lines
    assert f"has ended: exit code -9; the end of {log}: {last_lines}" in str(error_info.value)


def test_it_is_told_who_is_waited_for_while_a_model_loads(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trainer.roleplay.similarity.TELL_AFTER_S", 0.0)
    (tmp_path / "empty").mkdir()
    cfg = RewardConfig(embedding_model=str(tmp_path / "empty"))
    with pytest.raises(UserError), embedder_of(cfg, tmp_path / "log"):
        pass
    lines = [record.getMessage() for record in caplog.records]
    (message,) = [line for line in lines if "waited" in line]
    assert re.search(r"empty is loading. The run waits until \d\d:\d\d:\d\d. Its log: ", message)


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
        pytest.raises(UserError, match="its embedder ended") as error_info,
        embedder_of(empty, tmp_path / "log"),
    ):
        pass
    assert "\n" not in str(error_info.value)
