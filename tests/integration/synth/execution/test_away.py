"""Check a service that goes down during a stage and returns: the terminal reports each once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from synth.execution.processes import run_map_stage_on_processes
from testing.servers import running_app, wait_ready
from tests.kits.spawned import forked_workers
from tests.kits.synth.driver import STAGES, TEXTS, config, output, prepared, write_sources

AWAY = "MetricX does not answer: it is asked again, for 900 s"
BACK = "MetricX answers again"


class UnavailableApp:
    """A service that cannot score while `is_down()` is true."""

    def __init__(self, app, is_down):
        self.app, self.is_down = app, is_down

    async def __call__(self, scope, receive, send):
        if scope.get("path", "").startswith("/v1/score") and self.is_down():
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)


@pytest.mark.parametrize("processes", [1, 2])
def test_metricx_that_stays_away_is_told_once_when_it_goes_and_when_it_is_back(
    tmp_path, teacher, undisturbed, monkeypatch, processes
):
    monkeypatch.setattr("synth.execution.services.AWAY_S", 0.1)
    monkeypatch.setattr("synth.execution.services._CHECK_S", 0.01)
    lines = []
    app = create_app(FakeBackend("metricx"), ServiceSettings(cache="memory"))
    with running_app(UnavailableApp(app, lambda: not lines)) as url:
        wait_ready(url)
        write_sources(tmp_path, TEXTS)
        cfg = config(tmp_path, teacher, SimpleNamespace(url=url))
        manifest, work = prepared(STAGES[0], cfg, print_line=lines.append)
        with forked_workers("synth"):
            run_map_stage_on_processes(STAGES[0], manifest, work, processes)
    assert lines == [AWAY, BACK]
    stage = STAGES[0].name
    before = {key: content for key, content in output(undisturbed).items() if key[0] == stage}
    assert output(tmp_path) == before


def test_a_teacher_that_goes_away_is_told_too(tmp_path, teacher, metricx, monkeypatch):
    monkeypatch.setattr("synth.execution.services.AWAY_S", 0.0)
    lines = []
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, teacher__wait_for_server_s=60)
    teacher.fail("close", times=30)
    manifest, work = prepared(STAGES[0], cfg, print_line=lines.append)
    run_map_stage_on_processes(STAGES[0], manifest, work, 1)
    assert work.progress.stats.records_out == len(TEXTS)
    assert set(lines) <= {
        "the teacher does not answer: it is asked again, for 60 s",
        "the teacher answers again",
    }
