"""Share what takes long to make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.once import made_once
from tests.kits.trainer.searching.demo_index import make_demo_index


@pytest.fixture(scope="session")
def demo_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the index of some of the demo's PDFs, which all test processes read."""
    return made_once(tmp_path_factory, "demo-index", make_demo_index) / "index"
