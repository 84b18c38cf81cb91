"""The fake backend with a model that burns CPU in Python and so competes for the interpreter.

The model of the plain fake backend sleeps, as a process does that waits for a GPU.

    python -m bench.kit.busy --port 8010 --seconds-per-batch 0.02
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from scorekit.command import clean_exit
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend, FakeSettings


class BusyBackend(FakeBackend):
    """Burns CPU for `seconds_per_batch` instead of sleeping."""

    def __init__(self, settings: FakeSettings) -> None:
        super().__init__(settings.service)
        self.burn_s = settings.seconds_per_batch

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Burn CPU, then score."""
        burn(self.burn_s)
        return super().forward(batch)


def burn(seconds: float) -> None:
    """Hold the interpreter for so long, or as long as others let it go."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


if __name__ == "__main__":
    from scorekit.server.run import main

    with clean_exit(stdout="log"):
        main(FakeSettings, BusyBackend)
