"""A scoring service that fails for some texts, and counts what it scores."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.flaky_server import FlakyServer
from testing.servers import PATIENCE_S, running_app, wait_ready

#: Failures of a request with a bad text, and of the text alone.
FAILURES = ["429", "500", "503", "hang", "garbage", "nan", "refused"]


def is_bad(sample: TranslationSample) -> bool:
    """Return whether a text is one of the 3 in 10 that a sick service cannot score."""
    return fake_score(sample, 1.0) < 0.3


#: Returns the failure of a text, one of FAILURES; "": it is scored.
FailureOf = Callable[[TranslationSample], str]


def failure_named_by_text(sample: TranslationSample) -> str:
    """Return the failure that the translation is the name of."""
    return sample.mt if sample.mt in FAILURES else ""


def two_metrics(metricx: str, xcomet: str, **keys: Any) -> dict[str, Any]:
    """Return a definition of two services, and a rule that is only reported."""
    components = {
        "metricx": {"service": metricx, "offset": 5.0, "scale": -1.0},
        "xcomet": {"service": xcomet, "weight": 10.0},
        "chrf": {"rule": "chrf", "weight": 0.0},
    }
    return {"components": components, "timeout_s": 1.5, "deadline_s": 6.0, **keys}


def expected_reward(src: str, mt: str) -> float:
    """Return the reward of `two_metrics` for what the fake services answer."""
    sample = TranslationSample(src=src, mt=mt)
    return 5.0 - fake_score(sample, 25.0) + 10.0 * fake_score(sample, 1.0)


class Sick(FakeBackend):
    """Counts the texts that it scores, and has no score for bad texts."""

    def __init__(self, failure_of: FailureOf) -> None:
        super().__init__("xcomet")
        self.failure_of = failure_of
        self.scored: Counter[tuple[str, str]] = Counter()

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if self.failure_of(sample) == "refused":
                encoded[index] = SampleError("overlong", "too long")
        return encoded

    def _outcome(self, sample: TranslationSample) -> Outcome:
        self.scored[sample.src, sample.mt] += 1
        if self.failure_of(sample) == "nan":
            return {"score": math.nan}
        return super()._outcome(sample)


def sick_service(
    failure: str, is_bad: Callable[[TranslationSample], bool] = is_bad
) -> AbstractContextManager[tuple[Sick, str]]:
    """Serve an xCOMET that fails for bad texts, and yield its backend and its URL.

    failure: one of FAILURES; "": it is well.
    """
    return service_with_failures(lambda sample: failure if is_bad(sample) else "")


@contextmanager
def service_with_failures(failure_of: FailureOf) -> Iterator[tuple[Sick, str]]:
    """Serve an xCOMET that fails for each text as `failure_of` says; yield backend and URL."""

    def mood(path: str, body: str) -> Any:
        if path != "/v1/score":
            return None
        samples = [TranslationSample.model_validate(s) for s in json.loads(body)["samples"]]
        failures = map(failure_of, samples)
        return next((f for f in failures if f not in ("", "nan", "refused")), None)

    backend = Sick(failure_of)
    settings = ServiceSettings(cache="memory", stall_after=PATIENCE_S)
    flaky = FlakyServer(create_app(backend, settings), mood)
    with running_app(flaky) as url:
        wait_ready(url)
        backend.scored.clear()
        yield backend, url
        flaky.recover()
