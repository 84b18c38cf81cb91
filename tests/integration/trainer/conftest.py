"""Keep the runs of these tests cheap."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.kits.trainer.forked_trainer import CHARTS


@pytest.fixture(scope="module", autouse=True)
def no_charts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw no charts of a run where no test looks at them: they take most of a short run's time.

    A module whose tests look at them says DRAWS_CHARTS = True.
    """
    with pytest.MonkeyPatch.context() as patched:
        if not getattr(request.module, "DRAWS_CHARTS", False):
            for name in CHARTS:
                module = importlib.import_module(name)
                patched.setattr(module, "chart_image", lambda *arguments: None)
        yield
