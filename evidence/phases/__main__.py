"""Measure what each phase of `make demo-search` teaches: phase 1, phase 2, and a control of each.

    python -m evidence.phases                # what stands in runs/phases_evidence is kept
    python -m evidence.phases --jobs 8       # so many trainings at once, a thread each
    python -m evidence.phases --report       # write its page of evidence again

Phase 1 begins with the demo's searcher as it comes; phase 2 goes on from what phase 1 left with the
same seed. In a control the rewards of an update are dealt out among its episodes. All policies are
measured greedily on questions about documents that nothing was trained on. Each seed is one
observation.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, as_completed
from typing import Annotated

import typer
from rich.console import Console

from bench.common import RESULTS, WORK, machine, write_json
from demo.search.measured_sets import shared_services
from evidence.phases.runs import ARMS, START, Plan, make_plan, run
from evidence.search.arms import POLICY
from evidence.search.runs import services_of
from evidence.workers import check_policy, workers
from scorekit.command import clean_exit
from testing.processes import child_environment, exit_on_sigterm

console = Console(stderr=True, highlight=False)


def run_plan(plan: Plan, jobs: int) -> None:
    """Run what is missing. A run begins when the one that it goes on from is done."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_policy(plan.folder, POLICY)
    os.environ.update(child_environment())
    with shared_services(plan.folder, plan.sets) as urls, workers(plan.folder, jobs) as pool:
        services = dict(services_of(urls, plan.folder))
        running: dict[Future[float], tuple[str, int]] = {}

        def begin(start: str, seed: int) -> None:
            for name, arm in ARMS.items():
                if arm.start == start:
                    running[pool.submit(run, plan, name, seed, services)] = (name, seed)

        running[pool.submit(run, plan, START, 0, services)] = (START, 0)
        for seed in plan.seeds:
            begin(START, seed)
        while running:
            done = next(as_completed(running))
            name, seed = running.pop(done)
            console.print(f"{name}, seed {seed}: {done.result():.0f} s")
            if name != START:
                begin(name, seed)


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once, a thread each.")] = 2,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/phases.md.")
    ] = False,
) -> None:
    """Train what does not stand in runs/phases_evidence; write results and page."""
    exit_on_sigterm()
    out = (WORK if quick else RESULTS) / "phases_evidence.json"
    with clean_exit(stdout="log"):
        from evidence.phases.report import show, summarise, write_page

        if not report:
            plan, before = make_plan(quick, seeds or []), machine()
            run_plan(plan, jobs)
            write_json(out, {"machine": before, **summarise(plan)})
        results = json.loads(out.read_text(encoding="utf-8"))
        show(results)
        if not quick:
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
