"""Does a policy learn as much from older samples? `rl.max_staleness` 0, 1 and 4, three seeds each.

    python -m evidence.staleness   # all runs; what stands in runs/staleness_evidence is kept
    python -m evidence.staleness --only stale-0 --only stale-4 --seeds 1
    python -m evidence.staleness --report   # write its page of evidence again

The runs are those of `evidence.translation` in all but the bound: the demo policy, the demo's two
rewards over HTTP, the same held-out sources. The trainer generates each batch exactly
`max_staleness` updates early, so every token is as old as the bound allows.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from bench.common import RESULTS, WORK
from evidence.seeds import check_arms
from evidence.staleness.arms import ARMS, make_plan
from scorekit.command import clean_exit
from testing.processes import exit_on_sigterm


def main(
    quick: Annotated[bool, typer.Option(help="Six updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/staleness.md.")
    ] = False,
) -> None:
    """Train and measure what is missing; write results, page and chart."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exit_on_sigterm()
    out = (WORK if quick else RESULTS) / "staleness.json"
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        if not report:
            from evidence.staleness.summary import summarise
            from evidence.translation.runs import run_plan

            run_plan(make_plan(quick, only or [], seeds or [1, 2, 3]), out, summarise)
        results = json.loads(out.read_text(encoding="utf-8"))
        from evidence.staleness.report import show, write_page

        show(results)
        if not quick:
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
