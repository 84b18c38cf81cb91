"""A service that goes away during a stage, and comes back: the terminal says both, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.kit.servers import running_app, wait_ready
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.http.settings import ServiceSettings
from synth.context import StageContext
from synth.execution.processes import run_map_stage_on_processes
from synth.storage.stage_start import prepare_stage
from tests.kits.synth.driver import STAGES, TEXTS, config, output, write_sources

AWAY = "MetricX does not answer: it is asked again, for 900 s"
BACK = "MetricX answers again"


class Absent:
    """A service behind which nobody scores while `gone()` is true."""

    def __init__(self, app, gone):
        self.app, self.gone = app, gone

    async def __call__(self, scope, receive, send):
        if scope.get("path", "").startswith("/v1/score") and self.gone():
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
    told = []
    app = create_app(FakeBackend("metricx"), ServiceSettings(cache="memory"))
    with running_app(Absent(app, lambda: not told)) as url:
        wait_ready(url)
        write_sources(tmp_path, TEXTS)
        cfg = config(tmp_path, teacher, SimpleNamespace(url=url))
        ctx = StageContext(cfg, tmp_path, print_line=told.append)
        manifest = prepare_stage(STAGES[0], [], ctx)
        run_map_stage_on_processes(STAGES[0], manifest, ctx, processes)
    assert told == [AWAY, BACK]
    stage = STAGES[0].name
    before = {place: made for place, made in output(undisturbed).items() if place[0] == stage}
    assert output(tmp_path) == before


def test_a_teacher_that_goes_away_is_told_too(tmp_path, teacher, metricx, monkeypatch):
    monkeypatch.setattr("synth.execution.services.AWAY_S", 0.0)
    told = []
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, teacher__wait_for_server_s=60)
    teacher.fail("close", times=30)
    ctx = StageContext(cfg, tmp_path, print_line=told.append)
    run_map_stage_on_processes(STAGES[0], prepare_stage(STAGES[0], [], ctx), ctx, 1)
    assert ctx.stats.records_out == len(TEXTS)
    assert set(told) <= {
        "the teacher does not answer: it is asked again, for 60 s",
        "the teacher answers again",
    }
