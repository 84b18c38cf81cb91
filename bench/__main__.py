"""`python -m bench [--quick]`: measure the main numbers of docs/benchmarks.md in half an hour."""

from __future__ import annotations

from rich.console import Console

from bench import offsets, ray_serve, reward_wait, scoring, serving, trl_step
from bench.common import measure, parse_quick, table
from bench.embeddings import service as embeddings
from bench.rewards import __main__ as rewards
from bench.search_step import __main__ as search_step
from scorekit.command import run_command


def main() -> None:
    """Ask the questions of the scripts that need no GPU and break nothing."""
    quick = parse_quick(__doc__)
    # Serving first: torch's threads, once there, would sit beside the load.
    measurements = measure("serving", quick, serving.questions)
    measurements += measure("rewards", quick, rewards.questions)
    measurements += measure("ray_serve", quick, ray_serve.questions)
    measurements = measure("scoring", quick, scoring.questions) + measurements
    measurements += measure("embeddings", quick, embeddings.questions)
    measurements += measure("trl_step", quick, trl_step.questions)
    measurements += measure("search_step", quick, search_step.questions)
    measurements += measure("offsets", quick, offsets.questions)
    measurements += measure("reward_wait", quick, reward_wait.questions)
    Console().print(table(measurements))


if __name__ == "__main__":
    run_command(main, stdout="log")
