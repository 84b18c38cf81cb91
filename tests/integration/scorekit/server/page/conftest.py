"""Provide a real Chromium, and a service whose answers a test defines."""

from __future__ import annotations

from pathlib import Path

import pytest

import scorekit.server.page
from scorekit.server.backend import Encoded
from testing.servers import Held, running_service
from tests.kits.browser import BROWSER
from tests.kits.browser.live import new_tab, running_browser


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH"))


class Planned(Held):
    """Answer a translation with the fields that `plan` has for it, else as a FakeBackend does."""

    def __init__(self) -> None:
        super().__init__("xcomet")
        self.plan: dict[str, dict] = {}

    def encode(self, samples, options):
        results = super().encode(samples, options)
        for sample, result in zip(samples, results, strict=True):
            if isinstance(result, Encoded) and sample.mt in self.plan:
                result.fields.update(self.plan[sample.mt])
        return results

    def _outcome(self, sample):
        planned = self.plan.get(sample.mt, {})
        fields = {name: planned[name] for name in ("score", "error_spans") if name in planned}
        return super()._outcome(sample) | fields


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with running_browser(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def tab(browser):
    """Open a new tab, and check that its scripts raise nothing and its policy blocks nothing."""
    with new_tab(browser) as tab:
        yield tab
        tab.js("0")  # reads the messages so far
        assert tab.errors == []


@pytest.fixture(scope="package")
def backend():
    return Planned()


@pytest.fixture(scope="package")
def url(backend):
    with running_service(backend) as url:
        yield url


@pytest.fixture
def page(tab, url):
    """Return the page of that service, ready for input."""
    tab.open(url)
    tab.wait("document.getElementById('model').textContent")
    return tab


@pytest.fixture(scope="package")
def script():
    """Return the source of parts of the page's script, by name."""
    folder = Path(scorekit.server.page.__file__).parent
    return lambda *names: "\n".join((folder / f"{n}.js").read_text(encoding="utf-8") for n in names)
