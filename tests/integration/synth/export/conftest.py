"""Provide a run that has been exported."""

from __future__ import annotations

import pytest

from tests.kits.synth.output import exported_run


@pytest.fixture
def done(tmp_path):
    """Return a run with its export, and its config."""
    return exported_run(tmp_path / "run")
