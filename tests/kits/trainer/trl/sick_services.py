"""A scoring service that fails for some texts, and counts what it scores."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.http.settings import ServiceSettings
from testing.flaky_server import FlakyServer
from testing.servers import PATIENCE_S, running_app, wait_ready

#: Failures of a request with a bad text, and of the text alone.
FAILURES = ["429", "500", "503", "hang", "garbage", "nan", "refused"]


def is_bad(sample: TranslationSample) -> bool:
    """Return whether a text is one of the 3 in 10 that a sick service cannot score."""
    return fake_score(sample, 1.0) < 0.3


class Sick(FakeBackend):
    """Counts the texts that it scores, and has no score for bad texts."""

    def __init__(self, failure: str, is_bad: Callable[[TranslationSample], bool]) -> None:
        super().__init__("xcomet")
        self.failure, self.is_bad = failure, is_bad
        self.scored: Counter[tuple[str, str]] = Counter()

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if self.failure == "refused" and self.is_bad(sample):
                encoded[index] = SampleError("overlong", "too long")
        return encoded

    def _outcome(self, sample: TranslationSample) -> Outcome:
        self.scored[sample.src, sample.mt] += 1
        if self.failure == "nan" and self.is_bad(sample):
            return {"score": math.nan}
        return super()._outcome(sample)


@contextmanager
def sick_service(
    failure: str, is_bad: Callable[[TranslationSample], bool] = is_bad
) -> Iterator[tuple[Sick, str]]:
    """Serve an xCOMET that fails for bad texts, and yield its backend and its URL.

    failure: one of FAILURES; "": it is well.
    """

    def mood(path: str, body: str) -> Any:
        if path != "/v1/score" or failure in ("", "nan", "refused"):
            return None
        samples = [TranslationSample.model_validate(s) for s in json.loads(body)["samples"]]
        return failure if any(map(is_bad, samples)) else None

    backend = Sick(failure, is_bad)
    settings = ServiceSettings(cache="memory", stall_after=PATIENCE_S)
    flaky = FlakyServer(create_app(backend, settings), mood)
    with running_app(flaky) as url:
        wait_ready(url)
        backend.scored.clear()
        yield backend, url
        flaky.recover()
