"""Provide a corpus of two languages, a scoring service by its URL, and clean process state."""

from __future__ import annotations

import pytest

from demo.madlad_shard import documents, write_shard
from scorekit import languages
from scorekit.server.fake import FakeBackend
from testing.servers import running_service


@pytest.fixture
def restore_state(monkeypatch):
    """Restore the languages, which a run changes for the process."""
    monkeypatch.setattr(languages, "_ADDED", {})


@pytest.fixture(scope="module")
def metricx_url():
    with running_service(FakeBackend("metricx"), cache="memory") as url:
        yield url


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    for lang in ("en", "ko"):
        write_shard(root, documents(lang, 0, 12), lang=lang)
    return str(root / "data/*/*.gz")
