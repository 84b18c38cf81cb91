"""Measure what a searcher learns from which reward, on 320 questions about new documents.

    python -m evidence.search               # what stands in bench/results/search is kept
    python -m evidence.search --only both --seeds 1
    python -m evidence.search --development # measures the development set alone
    python -m evidence.search --report      # write its page of evidence again

Every arm begins with the demo's searcher as it comes and has the same budget; SFT on more scripted
episodes has about the same processor seconds. The runs go one after another, seed by seed, so that
a stop leaves whole rows. Each seed is one observation.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from evidence.search.arms import ARMS, SEEDS, make_plan
from evidence.seeds import check_arms
from scorekit.command import clean_exit
from testing.processes import child_environment, exit_on_sigterm


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    development: Annotated[
        bool, typer.Option(help="Measure the development set alone, and write no page.")
    ] = False,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/search.md.")
    ] = False,
) -> None:
    """Train and measure what is missing; write results and page, and say what they show."""
    exit_on_sigterm()
    os.environ.update(child_environment())
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        plan = make_plan(quick, only or [], seeds or SEEDS, development=development)
        if not report:
            from evidence.search.runs import run_plan

            run_plan(plan)
        from evidence.search.report import read_results, show, write_page

        results = read_results(plan.results)
        show(results)
        if not (quick or development):
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
