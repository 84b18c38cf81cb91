"""Check the simulation against real training runs, and measure how far an update overlaps.

Every run is a real one of the project's trainer, with servers and learning of set speed (see
bench/scaling/real_run.py). The trainer's own costs are fitted on three runs that alternate
generation and learning (`max_staleness` 0). Then other runs are predicted: with slower servers,
short queues, other batch sizes, and with `max_staleness` above 0. The figures are the relative
errors of the predicted seconds of an update.

The second part is the aim of training while batches are generated: an update's seconds, over the
larger of the seconds of generation and of learning, both measured in a run of the same settings
that alternates them.

    python -m bench.scaling.checks [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from bench.common import Measurement, quiet_logs, run
from bench.scaling.fit import fit, generation_s, learning_s, predict
from bench.scaling.real_run import EpisodeLengths, real_run, services
from bench.scaling.settings import LearnerSettings, RunSettings, SamplerSettings

#: Most relative error of a predicted update, and most seconds of an update over the larger part.
MAX_ERROR, MAX_RATIO = 0.10, 1.15
LEARNER = LearnerSettings(s_per_update=1.0, load_s=0.1)
BASE = RunSettings(
    samplers=SamplerSettings(step_s=0.005, step_s_per_request=0.0001),
    learner=LEARNER,
    episode=EpisodeLengths().plan,
    **services(0.1, 0.3, 0.1),
    batch_size=4,
    group=8,
    updates=8,
)
FITTED = {
    "2 x 8 episodes": replace(BASE, batch_size=2),
    "4 x 8 episodes": BASE,
    "8 x 8 episodes": replace(BASE, batch_size=8),
}
SLOW = SamplerSettings(step_s=0.01, step_s_per_request=0.0003)
CHECKED = {
    "6 x 8 episodes, slow sampler": replace(BASE, batch_size=6, samplers=SLOW),
    "at most 8 requests in the sampler": replace(
        BASE, samplers=replace(BASE.samplers, max_requests=8)
    ),
    "slow retriever": replace(BASE, **services(0.5, 0.3, 0.1)),
    "generator and judge of 4 calls at once": replace(BASE, **services(0.1, 0.4, 0.2, 4)),
    "3 x 4 episodes, long turns, slow learning": replace(
        BASE,
        batch_size=3,
        group=4,
        episode=EpisodeLengths(mean_tokens=60.0, stop_chance=0.25).plan,
        learner=replace(LEARNER, s_per_update=3.0),
    ),
}
#: Seconds of learning, and `max_staleness`, of the runs that overlap. Generation takes about 3 s.
OVERLAPPED = ((0.5, 1), (2.0, 1), (2.0, 2), (4.0, 1), (4.0, 4))
STEPS = {"learning is shorter": 0.5, "about equal": 2.0, "learning is longer": 4.0}


def errors(quick: bool) -> Iterator[Measurement]:
    """Yield the fitted costs and the errors of the checks."""
    runs = {name: real_run(_sized(cfg, quick)) for name, cfg in FITTED.items()}
    cost = fit([(_sized(FITTED[name], quick), result) for name, result in runs.items()])
    for name, value in asdict(cost).items():
        yield Measurement(f"fitted {name}", value, "s")
    for name, cfg in FITTED.items():
        yield _error(f"fitted: {name}", _sized(cfg, quick), runs[name], cost, is_check=False)
    for name, cfg in CHECKED.items():
        sized = _sized(cfg, quick)
        yield _error(f"checked: {name}", sized, real_run(sized), cost, is_check=True)


def _sized(cfg: RunSettings, quick: bool) -> RunSettings:
    return replace(cfg, updates=3) if quick else cfg


def _error(
    name: str, cfg: RunSettings, result: dict[str, Any], cost: Any, *, is_check: bool
) -> Measurement:
    measured_s, predicted_s = statistics.mean(result["updates_s"]), predict(cost, cfg)
    return Measurement(
        f"{name}: error of an update's seconds",
        abs(predicted_s / measured_s - 1),
        "",
        at_most=MAX_ERROR if is_check else None,
        note=f"measured {measured_s:.2f} s, simulated {predicted_s:.2f} s",
        details={"measured_s": measured_s, "simulated_s": predicted_s, "run": result},
    )


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    quiet_logs()
    yield from errors(quick)


if __name__ == "__main__":
    run("overlap", __doc__, questions)
