"""A corpus of two languages, a scoring service by its URL, and no state that goes on."""

from __future__ import annotations

import pytest
import structlog

from bench.kit.servers import running_service
from demo.madlad_shard import documents, write_shard
from scorekit import languages
from scorekit.server.fake import FakeBackend


#: For each tag: what the prompt calls it, a text in it, and one in its other variant (None where no
#: check tells them apart) with the code that rejects it.
@pytest.fixture
def own_state(monkeypatch):
    """A run sends the log of the process to its folder, and adds its languages to the process."""
    monkeypatch.setattr(languages, "_ADDED", {})
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


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
