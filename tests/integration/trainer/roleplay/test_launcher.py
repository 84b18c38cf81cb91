"""The embedder that a run starts for a folder of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

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
