"""Measure what a searcher learns from which reward: rewards, losses, controls, three seeds each.

    python -m evidence.search            # what stands in runs/search_evidence is kept
    python -m evidence.search --only both --only rows --seeds 1
    python -m evidence.search --report   # write its page of evidence again

Every arm begins with the demo's cold-started searcher and has the same budget. All policies are
measured by one yardstick on questions about documents that nothing was trained on: the final test,
on which nothing was tuned either, and the development set. Runs that lack a measurement are
measured, and not trained again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common import RESULTS, WORK, machine, write_json
from demo.search.measured_sets import running_services
from evidence.search.arms import ARMS, POLICY, SEEDS, Plan, make_plan
from evidence.search.runs import (
    Job,
    begin_worker,
    measure,
    run_job,
    services_of,
    start_of,
    start_path,
)
from evidence.seeds import check_arms
from scorekit.command import clean_exit
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.progress import progress_bar
from testing.processes import child_environment, exit_on_sigterm

#: Runs at the same time, a core each.
SIDE_BY_SIDE = 2
console = Console(stderr=True, highlight=False)


@contextmanager
def workers(folder: Path, jobs: int = SIDE_BY_SIDE) -> Iterator[ProcessPoolExecutor]:
    """Start the processes that train and measure; they end when this process is interrupted.

    A run that was interrupted does not count as done, and starts from the beginning the next time.
    jobs: how many. Their log goes into `folder`.
    """
    context, log = get_context("spawn"), folder / "runs.log"
    with ProcessPoolExecutor(jobs, context, begin_worker, (log,)) as pool:
        try:
            yield pool
        except BaseException:
            for worker in active_children():
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_policy(folder: Path, policy: Path) -> None:
    """Raise UserError where the runs in a folder began with another policy."""
    weights = (policy / "model.safetensors").read_bytes()
    digest, path = hashlib.sha256(weights).hexdigest(), folder / "policy.txt"
    if path.is_file() and path.read_text("utf-8") != digest:
        raise UserError(f"{folder}: its runs began with another policy: move it away")
    write_atomic(path, digest)


def measure_starts(
    plan: Plan, pool: ProcessPoolExecutor, urls: Mapping[str, Mapping[str, str]]
) -> None:
    """Measure each policy that a run starts from, with the generator of that set."""
    from evidence.search.control import random_policy

    arms = {arm.start_name: arm for arm in (ARMS[name] for name, _ in plan.runs)}
    missing = [
        (arm, set_name, path)
        for arm in arms.values()
        for set_name in plan.sets
        if not (path := start_path(plan.folder, arm.start_name, set_name)).is_file()
    ]
    weights = plan.folder / "random-policy"
    if any(arm.start == "random" for arm, _, _ in missing) and not weights.is_dir():
        pool.submit(random_policy, plan.policy, weights, 1).result()
    futures = [
        pool.submit(
            measure,
            plan,
            arm,
            set_name,
            services_of(arm, urls, plan.folder)[set_name],
            start_of(plan, arm),
            path,
        )
        for arm, set_name, path in missing
    ]
    for future in futures:
        future.result()


def run_plan(plan: Plan, out: Path) -> None:
    """Run all runs; write the results after each."""
    from evidence.search.summary import summarise

    before = machine()
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_policy(plan.folder, plan.policy)
    os.environ.update(child_environment())
    with running_services(plan.folder, plan.sets) as urls, workers(plan.folder) as pool:
        measure_starts(plan, pool, urls)
        jobs = [
            Job(plan, name, seed, services_of(ARMS[name], urls, plan.folder))
            for name, seed in plan.runs
        ]
        missing = [job for job in jobs if not job.is_done]
        with progress_bar(len(jobs), len(jobs) - len(missing)) as more:
            running = {pool.submit(run_job, job): job for job in missing}
            for done in as_completed(running):
                job = running[done]
                console.print(f"{job.arm.title}, seed {job.seed}: {done.result():.0f} s")
                more(1)
                write_json(out, {"machine": before, **summarise(plan)})
    write_json(out, {"machine": before, **summarise(plan)})


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    policy: Annotated[Path, typer.Option(help="Folder of the cold-started policy.")] = POLICY,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/search.md.")
    ] = False,
) -> None:
    """Train what does not stand in runs/search_evidence; write results and page."""
    exit_on_sigterm()
    out = (WORK if quick else RESULTS) / "search_evidence.json"
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        if not report:
            run_plan(make_plan(quick, only or [], seeds or SEEDS, policy), out)
        results = json.loads(out.read_text(encoding="utf-8"))
        from evidence.search.report import show, write_page

        show(results)
        if not quick:
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
