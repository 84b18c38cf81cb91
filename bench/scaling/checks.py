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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from bench.common import Measurement, quiet_logs, run
from bench.scaling.fit import WARM_UP, TrainerCost, fit, generation_s, learning_s, predict
from bench.scaling.real_run import EpisodeLengths, real_run, services
from bench.scaling.settings import LearnerSettings, RunSettings, SamplerSettings

#: Most relative error of a predicted update, and most seconds of an update over the larger part.
MAX_ERROR, MAX_RATIO = 0.10, 1.15
LEARNER = LearnerSettings(s_per_update=4.0, load_s=0.1)
BASE = RunSettings(
    samplers=SamplerSettings(step_s=0.009, step_s_per_request=0.0002),
    learner=LEARNER,
    episode=EpisodeLengths().plan,
    **services(0.3, 0.8, 0.3),
    batch_size=4,
    group=8,
    updates=6,
)
FITTED = {
    "2 x 8 episodes": replace(BASE, batch_size=2),
    "4 x 8 episodes": BASE,
    "8 x 8 episodes": replace(BASE, batch_size=8),
}
SLOW = SamplerSettings(step_s=0.015, step_s_per_request=0.0006)
CHECKED = {
    "6 x 8 episodes, slow sampler": replace(BASE, batch_size=6, samplers=SLOW),
    "at most 8 requests in the sampler": replace(
        BASE, samplers=replace(BASE.samplers, max_requests=8)
    ),
    "slow retriever, generator and judge of 4 calls at once": replace(
        BASE, **services(1.0, 0.8, 0.3, 4)
    ),
    "3 x 4 episodes, long turns, slow learning": replace(
        BASE,
        batch_size=3,
        group=4,
        episode=EpisodeLengths(mean_tokens=60.0, stop_chance=0.25).plan,
        learner=replace(LEARNER, s_per_update=8.0),
    ),
}
#: Seconds of learning's pause, and `max_staleness`, of the runs that overlap. Generation takes as
#: long as the second pause.
OVERLAPPED = ((1.5, 1), (4.0, 1), (4.0, 2), (4.0, 4), (8.0, 1))


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield the fitted costs, the errors of the checks, and the seconds of runs that overlap."""
    quiet_logs()
    runs = {name: real_run(_with_fewer_updates(cfg, quick)) for name, cfg in FITTED.items()}
    cost = fit(
        [(_with_fewer_updates(FITTED[name], quick), result) for name, result in runs.items()]
    )
    for name, value in asdict(cost).items():
        yield Measurement(f"fitted {name}", value, "s")
    for name, cfg in FITTED.items():
        yield _error(
            f"fitted: {name}", _with_fewer_updates(cfg, quick), runs[name], cost, is_check=False
        )
    for name, cfg in CHECKED.items():
        sized = _with_fewer_updates(cfg, quick)
        yield _error(f"checked: {name}", sized, real_run(sized), cost, is_check=True)
    for learn_s, max_staleness in OVERLAPPED[: 1 if quick else None]:
        yield from _overlap(learn_s, max_staleness, runs["4 x 8 episodes"], cost, quick)


def _overlap(
    learn_s: float,
    max_staleness: int,
    alternating: Mapping[str, Any],
    cost: TrainerCost,
    quick: bool,
) -> Iterator[Measurement]:
    """Run with batches ahead; yield the ratio and the error of the prediction.

    alternating: a run of the same settings with `max_staleness` 0. Its seconds of learning have
    another pause, so the difference of the pauses is added.
    """
    cfg = replace(
        BASE,
        learner=replace(LEARNER, s_per_update=learn_s),
        max_staleness=max_staleness,
        updates=4 if quick else 8 + max_staleness,
    )
    warm_up = max_staleness + 1
    generation = generation_s(alternating)
    learning = learning_s(alternating) + learn_s - LEARNER.s_per_update
    result = real_run(cfg, warm_up)
    measured_s = statistics.mean(result["updates_s"])
    name = (
        f"max_staleness {max_staleness}, learning {learning:.1f} s, generation {generation:.1f} s"
    )
    waited_s = statistics.mean(line["waited_s"] for line in result["lines"])
    yield Measurement(
        f"{name}: seconds of an update over the larger part",
        measured_s / max(generation, learning),
        "",
        at_most=MAX_RATIO,
        note=f"{measured_s:.2f} s an update",
        details={
            "update_s": measured_s,
            "generation_s": generation,
            "learning_s": learning,
            "alternating_s": generation + learning,
            "idle_share_of_learner": waited_s / measured_s,
            "idle_share_of_sampler": 1 - result["sampler_busy_s"][0] / result["wall_s"],
            "run": result,
        },
    )
    yield _error(f"checked: {name}", cfg, result, cost, is_check=True, warm_up=warm_up)


def _with_fewer_updates(cfg: RunSettings, quick: bool) -> RunSettings:
    return replace(cfg, updates=3) if quick else cfg


def _error(
    name: str,
    cfg: RunSettings,
    result: Mapping[str, Any],
    cost: TrainerCost,
    *,
    is_check: bool,
    warm_up: int = WARM_UP,
) -> Measurement:
    measured_s, predicted_s = statistics.mean(result["updates_s"]), predict(cost, cfg, warm_up)
    return Measurement(
        f"{name}: error of an update's seconds",
        abs(predicted_s / measured_s - 1),
        "",
        at_most=MAX_ERROR if is_check else None,
        note=f"measured {measured_s:.2f} s, simulated {predicted_s:.2f} s",
        details={"measured_s": measured_s, "simulated_s": predicted_s, "run": result},
    )


if __name__ == "__main__":
    run("overlap", __doc__, questions)
