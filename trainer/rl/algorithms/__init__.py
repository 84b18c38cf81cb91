"""The algorithms of an update. To add one, add a file with a subclass of `Algorithm` here, and a
line to `_CLASSES`."""

from __future__ import annotations

from pkgutil import resolve_name

from trainer.rl.algorithms.algorithm import Algorithm

#: File and class of each algorithm, in the order of messages.
_CLASSES = (
    "ppo:PPO",
    "gspo:GSPO",
    "reinforce:Reinforce",
)
_OBJECTS: list[Algorithm] = [resolve_name(f"{__name__}.{path}")() for path in _CLASSES]
#: Value of `rl.algorithm` -> the algorithm.
ALGORITHMS = {algorithm.name: algorithm for algorithm in _OBJECTS}
