"""A real Chromium, and a service whose answers a test writes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import scorekit.server.page
from bench.kit.servers import Held, running_service
from scorekit.server.backend import Encoded
from tests.kits.browser import BROWSER
from tests.kits.browser.live import new_tab, running_browser


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH"))


class Planned(Held):
    """Answers a translation with the fields that `plan` has for it, else as a FakeBackend does."""

    def __init__(self) -> None:
        super().__init__("xcomet")
        self.plan: dict[str, dict] = {}

    def encode(self, samples, options):
        made = super().encode(samples, options)
        for sample, one in zip(samples, made, strict=True):
            if isinstance(one, Encoded) and sample.mt in self.plan:
                one.fields.update(self.plan[sample.mt])
        return made

    def _outcome(self, sample):
        known = self.plan.get(sample.mt, {})
        told = {name: known[name] for name in ("score", "error_spans") if name in known}
        return super()._outcome(sample) | told


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with running_browser(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def tab(browser):
    """A new tab. Its scripts raise nothing, and its policy has nothing to refuse."""
    with new_tab(browser) as tab:
        yield tab
        tab.js("0")  # what was told until now is read
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
    """The page of that service, ready to be filled."""
    tab.open(url)
    tab.wait("document.getElementById('model').textContent")
    return tab


@pytest.fixture(scope="package")
def script():
    """The source of parts of the page's script, by name."""
    folder = Path(scorekit.server.page.__file__).parent
    return lambda *names: "\n".join((folder / f"{n}.js").read_text(encoding="utf-8") for n in names)
