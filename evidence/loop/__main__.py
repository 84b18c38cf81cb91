"""Does curation pay? Focus and distillation between two rounds, against random rows and none.

    python -m evidence.loop                 # what stands in bench/results/loop is kept
    python -m evidence.loop --only loop --seeds 1
    python -m evidence.loop --report        # write its section of the page again

evidence/loop/curation.py says what the arms are, evidence/loop/report.py makes the tables.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from bench.common import RESULTS, WORK
from evidence.loop.curation import ARMS, FOLDER, QUICK, SEEDS, Size, run_seeds
from evidence.seeds import check_arms
from scorekit.command import clean_exit
from testing.processes import child_environment, exit_on_sigterm


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/loop.md.")
    ] = False,
) -> None:
    """Train and measure what is missing; write results and page, and say what they show."""
    exit_on_sigterm()
    os.environ.update(child_environment())
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        folder = WORK / "loop_quick" if quick else FOLDER
        results = folder / "results" if quick else RESULTS / "loop"
        if not report:
            chosen = seeds or ([1] if quick else SEEDS)
            run_seeds(only or [], chosen, QUICK if quick else Size(), folder, results)
        from evidence.loop.report import read_results, show, write_page

        runs = read_results(results)
        show(runs)
        if not quick:
            write_page(runs)


if __name__ == "__main__":
    typer.run(main)
