"""Fit what the trainer itself costs on real runs, and predict other real runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.scaling.settings import RunSettings
from bench.scaling.simulation import simulate

#: The first update of a run is a warm-up.
WARM_UP = 1


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Seconds that the trainer's own code takes, besides the set times of servers and learning.

    turn_s: of a turn, while other turns go on: network, parsing, ids.
    driver_s: of a turn, one turn at a time: the processor time of the trainer's process.
    update_s, sequence_s: of an update, and of each sequence in it: forward, backward, files.
    """

    turn_s: float = 0.0
    driver_s: float = 0.0
    update_s: float = 0.0
    sequence_s: float = 0.0

    def added_to(self, cfg: RunSettings) -> RunSettings:
        """Return the settings with these seconds added."""
        samplers = replace(cfg.samplers, overhead_s=cfg.samplers.overhead_s + self.turn_s)
        learner = replace(
            cfg.learner,
            s_per_update=cfg.learner.s_per_update + self.update_s,
            s_per_sequence=cfg.learner.s_per_sequence + self.sequence_s,
        )
        driver_s = cfg.driver_s + self.driver_s
        return replace(cfg, samplers=samplers, learner=learner, driver_s=driver_s)


def generation_s(run: Mapping[str, Any]) -> float:
    """Return the mean seconds of a batch's generation, with its rewards, in a run that alternates
    generation and learning."""
    lines = zip(run["updates_s"], run["lines"], strict=True)
    return statistics.mean(seconds - line["update_s"] for seconds, line in lines)


def learning_s(run: Mapping[str, Any]) -> float:
    """Return the mean seconds of an update's learning, with the transfer of its weights."""
    return statistics.mean(line["update_s"] for line in run["lines"])


def fit(runs: Sequence[tuple[RunSettings, Mapping[str, Any]]]) -> TrainerCost:
    """Return the costs that explain these runs best. All alternate generation and learning.

    Those of learning are a line through the measured seconds over the sequences. Those of a turn
    give the smallest sum of squared relative errors of the generation's seconds.
    """
    import numpy as np
    from scipy.optimize import minimize, nnls

    rows = [[1.0, cfg.batch_episodes] for cfg, _ in runs]
    extra = [
        learning_s(run)
        - cfg.learner.s_per_update
        - cfg.learner.s_per_sequence * cfg.batch_episodes
        - cfg.learner.load_s
        for cfg, run in runs
    ]
    (update_s, sequence_s), _ = nnls(np.array(rows), np.array(extra))
    cost = TrainerCost(update_s=float(update_s), sequence_s=float(sequence_s))

    def error(values: Any) -> float:
        turn_s, driver_s = (abs(float(value)) for value in values)
        trial = replace(cost, turn_s=turn_s, driver_s=driver_s)
        return sum(
            (simulated_generation_s(trial.added_to(cfg)) / generation_s(run) - 1) ** 2
            for cfg, run in runs
        )

    best = minimize(error, [0.01, 0.003], method="Nelder-Mead", options={"maxfev": 80})
    turn_s, driver_s = (abs(float(value)) for value in best.x)
    return replace(cost, turn_s=turn_s, driver_s=driver_s)


def simulated_generation_s(cfg: RunSettings) -> float:
    """Return the mean seconds of a batch's generation, where it alternates with learning."""
    result = simulate(cfg)
    pairs = list(zip(result.starts, result.ends, strict=True))
    return statistics.mean(end - start for start, end in pairs[WARM_UP:])


def predict(cost: TrainerCost, cfg: RunSettings, warm_up: int = WARM_UP) -> float:
    """Return the mean seconds of an update behind the warm-up."""
    return simulate(cost.added_to(cfg)).update_s(warm_up)
