"""Does RL raise a policy above one that SFT has trained to its end? Arms, seeds, controls.

    python -m evidence.gain.start policy && python -m evidence.gain.start metrics
    python -m evidence.gain                # all runs; what stands in bench/results/gain is kept
    python -m evidence.gain --only ppo --seeds 1
    python -m evidence.gain --direction ko-en
    python -m evidence.gain --report       # write the page again

Each run is `python -m trainer train` against the start's two metrics over HTTP. The runs go seed by
seed. Settings are chosen with --development, which measures no other set.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from evidence.gain.arms import ARMS, make_plan
from evidence.gain.data import DIRECTIONS
from evidence.seeds import check_arms
from scorekit.command import clean_exit
from scorekit.errors import UserError
from testing.processes import exit_on_sigterm


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    development: Annotated[
        bool, typer.Option(help="Measure the development set alone, and write no page.")
    ] = False,
    direction: Annotated[Literal["en-ko", "ko-en"], typer.Option(help="What is translated.")] = (
        "en-ko"
    ),
    report: Annotated[bool, typer.Option(help="Only write the page, from the results.")] = False,
) -> None:
    """Train and measure what is missing; write results and page, and say what they show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exit_on_sigterm()
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        plan = make_plan(
            quick,
            only or [],
            seeds or [1, 2, 3, 4, 5],
            development=development,
            direction=DIRECTIONS[direction],
        )
        if not report:
            from evidence.gain.runs import run_plan

            run_plan(plan)
        from evidence.gain.report import read_results, show, write_page

        results = read_results(plan.results)
        if not results["runs"]:
            raise UserError(f"{plan.results}: has no result yet. Run this without --report first")
        show(results)
        if not (quick or development):
            write_page(results, plan.direction)


if __name__ == "__main__":
    typer.run(main)
