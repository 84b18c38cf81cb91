"""Provide the teacher and the scoring service of a test file, and an uninterrupted run."""

from __future__ import annotations

import pytest
import structlog

from scorekit.report.page import chart_image
from scorekit.server.fake import FakeBackend
from testing.openai_server import FakeOpenAI
from testing.servers import running_service
from tests.kits.synth.driver import TEXTS, config, korean, run, write_sources


@pytest.fixture(autouse=True)
def restore_log():
    """Restore the log settings, because a run sends the log of the process to its folder."""
    log_config = structlog.get_config()
    yield
    structlog.configure(**log_config)


@pytest.fixture(scope="module", autouse=True)
def no_charts(request):
    """Draw no charts where no test looks at them: they take half of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_whole.py":
            patch.setattr("synth.report.page.chart_image", lambda *arguments: None)
        yield


@pytest.fixture
def charts(monkeypatch):
    """Draw the charts of reports."""
    monkeypatch.setattr("synth.report.page.chart_image", chart_image)


@pytest.fixture(scope="module")
def teacher():
    fake = FakeOpenAI(respond=korean)
    with fake.running() as url:
        fake.url = url
        yield fake


@pytest.fixture(scope="module")
def metricx():
    backend = FakeBackend("metricx")
    with running_service(backend, cache="memory") as url:
        backend.url = url
        yield backend


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, teacher, metricx):
    out = tmp_path_factory.mktemp("undisturbed")
    write_sources(out, TEXTS)
    run(config(out, teacher, metricx))
    return out
