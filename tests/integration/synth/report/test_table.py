"""Check that a stage added to the table appears everywhere stages are listed."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.errors import UserError
from synth.cost import Cost
from synth.execution.driver import run_map_stage
from synth.execution.stage import MapStage
from synth.record import KeptRecord, RejectedRecord
from synth.report.estimate import estimate, plan, status
from synth.report.page import write_report
from synth.report.views import write_stats
from synth.stages.table import BY_NAME, ORDER, in_order, stage_names
from synth.storage.distributions import Distribution, DistributionChart
from tests.kits.synth.driver import prepared
from tests.kits.synth.output import config, make_run, printed, views_of


class CountWords(MapStage):
    """A toy stage that counts the words of each source and sends no requests."""

    name = "count_words"
    view = "counted.jsonl"
    shows_rejected = True
    charts = (DistributionChart("Words of a toy", "words", "source", "words"),)

    def settings(self, cfg):
        return {}

    def uses(self, cfg):
        return frozenset()

    async def process(self, record, clients):
        words = len(record["source_text"].split())
        if words < 3:
            return RejectedRecord(record, "too_short")
        return KeptRecord({**record, "words": words})

    def cost(self, run):
        return Cost(self.name, records=run.chosen, disk_bytes=12_000_000, driver_s=(3600.0, 0.0))

    def distributions(self, cfg, records):
        words = Distribution()
        for record in records:
            words.add(record["words"])
        return {"words": words}


def rows(text, name):
    return [line.split() for line in text.splitlines() if name in line]


def test_a_stage_that_is_added_is_found_in_status_estimate_views_and_report(
    tmp_path, monkeypatch, charts
):
    stages = in_order(*map(type, ORDER[:5]), CountWords, *map(type, ORDER[5:]))
    toy = stages[5]
    monkeypatch.setitem(BY_NAME, toy.name, toy)
    cfg = config(tmp_path)
    make_run(tmp_path)
    assert "–" in rows(printed(status(tmp_path, stages)), toy.name)[0]

    manifest, work = prepared(toy, cfg, stages[6:])
    asyncio.run(run_map_stage(toy, manifest, work))
    stats = write_stats(cfg, work.folder, work.progress.stats)
    assert stats["stages"][toy.name]["distributions"]["words"]["n"] == 10

    assert views_of(cfg, toy.name)[0] == tmp_path / "counted.jsonl"
    assert len((tmp_path / "counted.jsonl").read_text().splitlines()) == 10
    assert "done" in rows(printed(status(tmp_path, stages)), toy.name)[0]
    counts, hours = rows(printed(estimate(cfg, stages=stages)), toy.name)[:2]
    assert counts == [toy.name, "12", "MB"]
    assert hours == [toy.name, "10.0", "driver"]
    page = write_report(tmp_path, order=stages).read_text(encoding="utf-8")
    assert f"<td>{toy.name}</td>" in page
    assert "Words of a toy" in page


def test_each_stage_follows_the_one_before_it_in_the_table():
    assert [stage.after for stage in ORDER] == [None, *ORDER[:-1]]
    assert ORDER[-1].previous_stages == ORDER[:-1]
    assert len({stage.name for stage in ORDER}) == len(ORDER)
    assert stage_names("all") == tuple(BY_NAME)
    assert stage_names("score_128_select_best") == ("score_select_best",)
    with pytest.raises(UserError, match="--stage nothing: give all, or one of sample_sources, "):
        stage_names("nothing")


def test_the_costs_are_of_the_stages_in_their_order(tmp_path):
    estimated = plan(config(tmp_path))
    assert [cost.stage for cost in estimated.costs] == list(BY_NAME)
    assert all(cost.disk_bytes and sum(cost.driver_s) for cost in estimated.costs)
