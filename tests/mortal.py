"""`python -m tests.mortal --port N`: a fake service whose process dies as by the kernel's hand."""

import os
import signal

from scorekit.server.fake import FakeBackend, FakeSettings
from scorekit.server.run import main

#: Texts in `mt`: one that ends the process when it is scored, and one that does if two are.
DEADLY, HEAVY = "deadly", "heavy"


class Mortal(FakeBackend):
    """Dies of a deadly sample, and of two heavy ones in a batch."""

    def forward(self, batch):
        texts = [encoded.payload.mt for encoded in batch]
        if any(DEADLY in mt for mt in texts) or sum(HEAVY in mt for mt in texts) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


if __name__ == "__main__":
    main(FakeSettings, lambda settings: Mortal(settings.service))
