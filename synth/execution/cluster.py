"""Run the shards of a map stage as tasks of an existing Ray cluster, with identical files.

Tasks of a node that dies run again on other nodes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from scorekit.errors import UserError
from synth.config import SynthConfig, answers_place
from synth.execution.driver import run_async, run_map_stage
from synth.execution.processes import shared_budget
from synth.execution.stage import MapStage, StageIncomplete, StageWork
from synth.storage.shares import ShardShare
from synth.storage.store import StageFolder

T = TypeVar("T")

#: Seconds to wait for cancelled tasks.
_END_S = 30.0


def run_map_stage_on_ray(stage: MapStage, manifest: dict[str, Any], work: StageWork) -> None:
    """Run this process's shards as Ray tasks; all nodes must see the run's folder.

    The config's budgets (concurrency, sequences, rate) are for the run: each task gets a share.
    Raises UserError if there is no cluster, StageIncomplete if records are left open.
    """
    import ray
    import ray.exceptions

    connect(work.cfg)
    folder, progress, stats = work.folder, work.progress, work.progress.stats
    stats.of_others = True  # each task writes its own stats
    shards = stage.input_of(work.out_dirs).shards() or 0
    folder.set_manifest({**manifest, "shards": shards})
    todo = [index for index in work.share.assigned(shards) if folder.mark(index) is None]
    cores = int(ray.cluster_resources().get("CPU", 1))
    at_once = max(1, min(len(todo), cores, work.cfg.teacher.max_concurrency))
    cfg = with_absolute_answers(shared_budget(work.cfg, at_once)).model_dump(mode="json")
    task = ray.remote(num_cpus=1, max_retries=3)(_run_shard)
    out_dirs = tuple(out_dir.absolute() for out_dir in work.out_dirs)
    progress.advance(0, len(todo))
    options = (work.limit, work.give_up, shards)
    waiting: list[Any] = []
    try:
        while todo or waiting:
            while todo and len(waiting) < at_once:
                waiting.append(task.remote(stage, cfg, out_dirs, options, todo.pop(0)))
            finished, waiting = ray.wait(waiting)
            for records_in, records_out, open_ in ray.get(finished):
                stats.records_in += records_in
                stats.records_out += records_out
                stats.open.update(open_)
                progress.advance(1, None)
    except ray.exceptions.RayTaskError as error:  # its cause has the one-line message
        raise error.cause from None
    finally:
        _end(waiting)
    if stats.open:
        raise StageIncomplete(stage.name, stats.open)


def with_absolute_answers(cfg: SynthConfig) -> SynthConfig:
    """Return a copy whose cache of answers has an absolute path: a worker has a folder of its own.

    A URL of a Redis stays as it is.
    """
    location = answers_place(cfg)
    answers = location if "://" in location else str(Path(location).absolute())
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"answers": answers})})


def connect(cfg: SynthConfig) -> int:
    """Join the cluster; return the number of its machines.

    Raises UserError if there is no cluster, or if its machines cannot share the answer cache."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            raise UserError(
                "--engine ray: no Ray cluster found. Run `ray start --head`, or set RAY_ADDRESS"
            ) from None
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if "://" not in answers_place(cfg) and len(machines) > 1:
        raise UserError(
            "--engine ray: several machines need run.answers on a Redis (redis://...): a SQLite "
            "file is for one"
        )
    return len(machines)


def on_a_node(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work` on a cluster machine, which may reach other services."""
    import ray

    result: T = ray.get(ray.remote(num_cpus=1)(work).remote(*arguments))
    return result


def _end(tasks: list[Any]) -> None:
    """Cancel the remaining tasks: they would continue to send requests and hold their shards."""
    import ray

    for task in tasks:
        ray.cancel(task, force=True)
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=_END_S)


def _run_shard(
    stage: MapStage,
    cfg: dict[str, Any],
    out_dirs: tuple[Path, ...],
    options: tuple[int | None, bool, int],
    index: int,
) -> tuple[int, int, dict[str, int]]:
    """Run one shard in a process of the cluster, which writes its own stats.

    Returns the number of records in and out, and the open ones by code."""
    limit, give_up, shards = options
    folder = StageFolder(out_dirs[0], stage.name)
    work = StageWork(
        SynthConfig.model_validate(cfg),
        folder,
        out_dirs,
        limit=limit,
        share=ShardShare(index, shards),
        give_up=give_up,
    )
    with contextlib.suppress(StageIncomplete):
        run_async(run_map_stage(stage, folder.manifest() or {}, work))
    stats = work.progress.stats
    stats.flush(folder, every_s=0)
    return stats.records_in, stats.records_out, dict(stats.open)
