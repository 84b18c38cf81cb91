"""Checkpoints that several files of golden tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits.comet import golden as comet_golden


@pytest.fixture(scope="session")
def comet_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives the folder of a checkpoint's name, which it builds once. Only read it."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = comet_golden.build(name, tmp_path_factory.mktemp("comet"))
        return folders[name]

    return folder_of
