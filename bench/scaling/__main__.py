"""Simulate training runs: who waits, how many updates an hour, and which settings are best.

Three runs are simulated (search, reasoning, translation). First with two servers, for each
`max_staleness`, where learning takes half as long as generation, as long, and twice as long: with
batches that overlap, as the trainer collects them, and with batches that are collected one after
the other. The figure is the seconds of an update over those of generating one batch alone. Then
divisions of 8, 64 and 512 GPUs into samplers and learner are
tried, and the best one is given. One GPU takes turns at sampling and learning.

Lengths are those measured on the demo's episodes; speeds of GPUs are assumptions
(bench/scaling/workloads.py says which). How well the simulation predicts real runs:
`python -m bench.scaling.checks`.

    python -m bench.scaling [--quick]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import Measurement, quiet_logs, run
from bench.scaling.choice import (
    Constraints,
    Option,
    best_option,
    idle_shares,
    simulate_option,
)
from bench.scaling.settings import Batches, LearnerSettings, RunSettings
from bench.scaling.simulation import simulate
from bench.scaling.workloads import SOURCES, workloads

#: GPUs, and episodes of an update that are tried with so many.
SIZES = {8: (256, 512), 64: (512, 1024), 512: (2048,)}
#: Servers of the first part; episodes of a prompt; seconds of learning over those of generation.
SERVERS, GROUP, RATIOS = 2, 8, (0.25, 0.5, 1.0, 2.0)


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    quiet_logs()
    for name, base in workloads().items():
        if quick:
            base = replace(base, updates=4)
        yield from _by_staleness(name, base, quick)
        yield _on_one_gpu(name, base)
        for gpus in (8,) if quick else SIZES:
            yield _best(name, base, gpus)


def _by_staleness(name: str, base: RunSettings, quick: bool) -> Iterator[Measurement]:
    base = replace(base, samplers=replace(base.samplers, servers=SERVERS), group=GROUP)
    alone = simulate(replace(base, learner=LearnerSettings(load_s=base.learner.load_s)))
    generation_s = alone.update_s(1)
    for ratio in RATIOS[1:2] if quick else RATIOS:
        learner = LearnerSettings(s_per_update=ratio * generation_s, load_s=base.learner.load_s)
        for max_staleness in (0, 1) if quick else (0, 1, 2, 4):
            modes: tuple[Batches, ...] = ("overlapping", "ordered")
            for batches in modes[: 2 if max_staleness else 1]:
                cfg = replace(base, learner=learner, max_staleness=max_staleness, batches=batches)
                result = simulate(cfg)
                ages = [age for update_ages in result.ages for age in update_ages]
                yield Measurement(
                    f"{name}, learning {ratio:g} of generation, max_staleness {max_staleness}, "
                    f"{batches}: an update",
                    result.update_s(max_staleness + 1) / generation_s,
                    "of generating a batch alone",
                    details={
                        "generation_s": generation_s,
                        "idle": idle_shares(result),
                        "staleness_mean": sum(ages) / len(ages),
                        "staleness_max": max(ages),
                        "simulated": True,
                    },
                )


def _on_one_gpu(name: str, base: RunSettings) -> Measurement:
    """Return the result where one GPU does both; generation and learning alternate."""
    option = simulate_option(base, 1, 1, 0, GROUP, 256)
    return _measurement(f"{name}, 1 GPU for both", option)


def _best(name: str, base: RunSettings, gpus: int) -> Measurement:
    base = replace(base, updates=min(base.updates, 16 if gpus == 8 else 6))
    limits = Constraints(gpus, min_group=GROUP, batch_episodes=SIZES[gpus])
    option = best_option(base, limits)
    return _measurement(f"{name}, best of {gpus} GPUs", option)


def _measurement(question: str, option: Option) -> Measurement:
    details = option.as_row() | {"sources": SOURCES, "simulated": True}
    return Measurement(f"{question}: updates", option.updates_an_hour, "an hour", details=details)


def option_table(measurements: Sequence[Measurement]) -> Table:
    """Return a row for each simulated setting."""
    titles = ("run", "servers + learning", "staleness", "prompts x group", "s an update")
    output = Table(
        *titles, "updates an hour", "episodes an hour", "idle: samplers, learner, services"
    )
    for measurement in measurements:
        if "update_s" not in measurement.details:
            continue
        row: dict[str, Any] = measurement.details
        idle = ", ".join(f"{name} {share:.0%}" for name, share in row["idle"].items())
        output.add_row(
            measurement.question.removesuffix(": updates"),
            f"{row['servers']} + {row['learner_gpus']}",
            str(row["max_staleness"]),
            f"{row['batch_size']} x {row['group']}",
            f"{row['update_s']:.1f}",
            f"{row['updates_an_hour']:.1f}",
            f"{row['episodes_an_hour']:,.0f}",
            idle,
        )
    return output


if __name__ == "__main__":
    Console(width=200).print(option_table(run("scaling", __doc__, questions)))
