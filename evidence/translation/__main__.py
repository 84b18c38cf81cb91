"""Does the trainer learn what it is rewarded for? Arms, seeds, a control, and what they became.

    python -m evidence.translation   # all runs; what stands in runs/evidence is not run again
    python -m evidence.translation --only both --only shuffled
    python -m evidence.translation --report   # write its page of evidence again
    python -m evidence.translation --omissions  # spans with and without what is left out

Each run is `python -m trainer train` on the demo policy against both demo services over HTTP. Its
checkpoints are then measured on held-out sources that nothing was tuned on, with the true services.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from bench.common import RESULTS, WORK
from evidence.seeds import check_arms
from evidence.translation.arms import make_plan
from evidence.translation.runs import run_plan
from scorekit.command import clean_exit
from testing.processes import exit_on_sigterm


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    report: Annotated[
        bool, typer.Option(help="Only write docs/explanation/evidence/translation.md.")
    ] = False,
    omissions: Annotated[
        bool, typer.Option(help="Spans, with and without omissions; results of their own.")
    ] = False,
) -> None:
    """Train and measure what does not stand in runs/evidence; write results and page."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exit_on_sigterm()
    out = (WORK if quick else RESULTS) / f"rl_{'omissions' if omissions else 'evidence'}.json"
    with clean_exit(stdout="log"):
        plan = make_plan(quick, only or [], seeds or [1, 2, 3], omissions)
        check_arms(only or [], plan.arms)
        if not report:
            from evidence.translation.summary import summarise

            run_plan(plan, out, summarise)
        results = json.loads(out.read_text(encoding="utf-8"))
        from evidence.translation.report import show, write_page

        show(results)
        if not quick:
            write_page(results)


if __name__ == "__main__":
    typer.run(main)
