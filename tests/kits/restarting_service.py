"""`python -m tests.kits.restarting_service --port N`: a fake service, restarted when it dies.

It dies from SIGKILL. It prints a line for each death.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend, FakeSettings
from scorekit.server.run import main

#: Texts in `mt`: one that ends the process when it is scored, and one that does if two are.
DEADLY, HEAVY = "deadly", "heavy"


class Mortal(FakeBackend):
    """A model that kills its process: on one deadly sample, or on two heavy ones in a batch."""

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        texts = [encoded.payload.mt for encoded in batch]
        if any(DEADLY in mt for mt in texts) or sum(HEAVY in mt for mt in texts) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


def live_again_and_again() -> None:
    """Restart the service whenever it dies.

    Each start is a fork of this process, which has all imports already, so that it is fast on a
    busy machine.
    """
    while (life := os.fork()) != 0:
        _, status = os.waitpid(life, 0)
        if not os.WIFSIGNALED(status):
            return  # it could not start
        print("died", flush=True)
    main(FakeSettings, lambda settings: Mortal(settings.service))


if __name__ == "__main__":
    live_again_and_again()
