"""Shards as tasks of a Ray cluster: the same bytes as one process makes."""

from __future__ import annotations

import pytest

from scorekit.errors import ServiceUnreachable, UserError
from synth.context import Context, begin
from synth.engine_ray import run_map_stage_on_ray, shared_budget
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import SelectSources
from tests.integration.test_synth_driver import (  # noqa: F401
    NAMES,
    TEXTS,
    config,
    metricx,
    output,
    teacher,
    undisturbed,
    write_sources,
)


@pytest.fixture
def cluster():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_makes_the_same_bytes(
    tmp_path, cluster, teacher, metricx, undisturbed  # noqa: F811
):  # fmt: skip
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    for stage in (PrefilterScore(), SelectSources(), Generate128(), ScoreSelectBest()):
        ctx = Context(cfg, tmp_path)
        manifest = begin(stage, NAMES[NAMES.index(stage.name) + 1 :], ctx)
        if hasattr(stage, "process"):
            run_map_stage_on_ray(stage, manifest, ctx)
        else:
            stage.run(ctx, manifest)
        assert ctx.stats.records_out > 0
    assert output(tmp_path) == output(undisturbed)


@pytest.mark.slow
def test_a_mistake_is_told_in_one_line_from_a_cluster_too(tmp_path, cluster, teacher, metricx):  # noqa: F811
    write_sources(tmp_path, TEXTS)
    stage = PrefilterScore()

    def start(cfg, **options):
        ctx = Context(cfg, tmp_path, **options)
        run_map_stage_on_ray(stage, begin(stage, [], ctx), ctx)

    cfg = config(tmp_path, teacher, metricx)
    teacher.fail(503, times=None)
    with pytest.raises(ServiceUnreachable, match="the teacher: unreachable"):
        start(cfg)
    teacher.well()
    cfg.teacher.model = "another"
    with pytest.raises(UserError, match="does not serve a model named 'another'") as failed:
        start(cfg, overwrite=True)
    assert "\n" not in str(failed.value)


def test_the_budget_is_for_the_run_and_not_for_each_task(tmp_path, teacher, metricx):  # noqa: F811
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.max_sequences = 100
    cfg.teacher.requests_per_minute = 60.0
    told = shared_budget(cfg, 4).teacher
    assert (told.max_concurrency, told.max_sequences, told.requests_per_minute) == (2, 25, 15.0)
    assert shared_budget(cfg, 1).teacher == cfg.teacher
