"""Keep the runs of these tests cheap."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.kits.forked import CHARTS


@pytest.fixture(scope="module", autouse=True)
def no_charts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw no charts of a run where no test looks at them: they take most of a short run's time.

    A module whose tests look at them names these tests in DRAWS_CHARTS. Its fixtures draw charts.
    """
    with pytest.MonkeyPatch.context() as patched:
        if not getattr(request.module, "DRAWS_CHARTS", ()):
            draw_none(patched)
        yield


@pytest.fixture(autouse=True)
def no_charts_for_other_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw no charts for a test that DRAWS_CHARTS does not name."""
    if request.function.__name__ not in getattr(request.module, "DRAWS_CHARTS", ()):
        draw_none(monkeypatch)


def draw_none(patch: pytest.MonkeyPatch) -> None:
    for name in CHARTS:
        module = importlib.import_module(name)
        patch.setattr(module, "chart_image", lambda *arguments: None)
