"""Check shards as tasks of a Ray cluster: the same bytes as from one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scorekit.errors import ServiceUnreachable, UserError
from synth.config import answers_place
from synth.execution.cluster import run_map_stage_on_ray, shared_budget, with_absolute_answers
from synth.execution.stage import MapStage
from synth.preflight import check_run
from synth.run import RunOptions
from testing.servers import PATIENCE_S, wait_until
from tests.kits.synth.driver import (
    STAGES,
    TEXTS,
    config,
    count_repeated_requests,
    most_in_flight,
    output,
    prepared,
    write_sources,
)


@pytest.fixture
def cluster():
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_makes_the_same_bytes(
    tmp_path,
    cluster,
    teacher,
    metricx,
    undisturbed,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    for stage in STAGES:
        manifest, work = prepared(stage, cfg, STAGES[STAGES.index(stage) + 1 :])
        if isinstance(stage, MapStage):
            run_map_stage_on_ray(stage, manifest, work)
        else:
            stage.run(work, manifest)
        assert work.progress.stats.records_out > 0
    assert output(tmp_path) == output(undisturbed)


@pytest.fixture
def two_nodes():
    """Yield a cluster of two nodes with a core each, and their handles."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_the_shards_of_a_node_that_dies_are_done_by_the_other(
    tmp_path,
    two_nodes,
    teacher,
    metricx,
    undisturbed,
):
    cluster, nodes = two_nodes
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)  # 8 requests in flight, 4 a node
    stage = STAGES[0]
    teacher.forget()
    teacher.hang = True
    manifest, work = prepared(stage, cfg)
    working = threading.Thread(target=run_map_stage_on_ray, args=(stage, manifest, work))
    working.start()
    try:
        wait_until(lambda: teacher.in_flight == 8)  # both nodes work
        cluster.remove_node(nodes[0], allow_graceful=False)
        wait_until(lambda: teacher.in_flight == 4)
    finally:
        teacher.well()
        working.join(PATIENCE_S)
    stats = work.progress.stats
    assert (stats.records_in, stats.records_out) == (20, 20)
    assert (
        count_repeated_requests(teacher.requests) <= most_in_flight(shared_budget(cfg, 2), 1) == 4
    )
    stage_output = {name: data for name, data in output(tmp_path).items() if stage.name in name}
    assert (
        stage_output == {name: output(undisturbed)[name] for name in stage_output}
        and len(stage_output) == 3
    )


@pytest.mark.slow
def test_a_mistake_is_told_in_one_line_from_a_cluster_too(tmp_path, cluster, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    stage = STAGES[0]

    def start(cfg, **options):
        run_map_stage_on_ray(stage, *prepared(stage, cfg, **options))

    cfg = config(tmp_path, teacher, metricx)
    teacher.fail(503, times=None)
    with pytest.raises(ServiceUnreachable, match="the teacher: unreachable"):
        start(cfg)
    teacher.well()
    cfg.teacher.model = "another"
    with pytest.raises(UserError, match="does not serve a model named 'another'") as error_info:
        start(cfg, overwrite=True)
    assert "\n" not in str(error_info.value)


@pytest.mark.slow
def test_a_node_of_the_cluster_asks_the_services_before_the_run(
    tmp_path, cluster, teacher, metricx
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    options = RunOptions((STAGES[0].name,), engine="ray")
    findings = check_run(cfg, options)
    assert not findings.failed
    assert {"ray", "teacher", "metricx"} <= {check.name for check in findings.checks}
    cfg.teacher.model = "another"
    (message,) = check_run(cfg, options).errors
    assert message.startswith("teacher: ") and "does not serve a model named 'another'" in message


def test_the_budget_is_for_the_run_and_not_for_each_task(tmp_path, teacher, metricx):
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.max_sequences = 100
    cfg.teacher.requests_per_minute = 60.0
    task_budget = shared_budget(cfg, 4).teacher
    assert (
        task_budget.max_concurrency,
        task_budget.max_sequences,
        task_budget.requests_per_minute,
    ) == (2, 25, 15.0)
    assert shared_budget(cfg, 1).teacher == cfg.teacher


def test_a_task_in_another_folder_writes_its_answers_beside_the_run(
    tmp_path, monkeypatch, teacher, metricx
):
    cfg = config(tmp_path, teacher, metricx)
    monkeypatch.chdir(tmp_path)
    cfg.run.out_dir, cfg.run.answers = Path("run"), None
    assert answers_place(with_absolute_answers(cfg)) == str(tmp_path / "run/answers.sqlite")
    cfg.run.answers = "redis://cache:6379/1"
    assert answers_place(with_absolute_answers(cfg)) == "redis://cache:6379/1"
