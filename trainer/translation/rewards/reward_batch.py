"""A batch of samples that the reward services score: services that failed for it, refused sources.

The policy did not write a source that is refused with any translation, so it has no penalty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ScorekitError, ServiceUnreachable
from scorekit.rewards.results import log_words
from scorekit.schemas import Failed, Scored, WireError
from scorekit.scorers import RewardOutput, SampleForScoring

log = logging.getLogger(__name__)
#: As in its `/v1/info` and its config keys; for a judge, the task (`host`).
ServiceName = str
#: Tasks of a judge: error spans, and the verdict of a rubric.
MQM, VERDICT = "mqm", "judge"
#: The composite reward of `reward.definition`, which asks services of its own.
COMPOSITE = "definition"
#: Source and translation, and, if known, their languages.
Text = tuple[str, str] | tuple[str, str, str, str]
#: Error type of a source that is refused with any translation.
BAD_SOURCE = "bad_source"
#: Error type of a sample that a gate of the composite reward refuses.
CLOSED_GATE = "closed_gate"
#: Error types that are no failure of a service.
SAMPLE_ERROR_TYPES = {*TEXT_ERROR_TYPES, BAD_SOURCE, CLOSED_GATE}
#: Seconds between two checks of a pending answer; after which a warning is logged first, and after
#: which it is cancelled if the run is to end.
_TICK_S = 1.0
_FIRST_WARNING_S = 10.0
_CANCEL_AFTER_S = 5.0


def host(name: ServiceName) -> str:
    """Return the name of the service, as in its `/v1/info`."""
    return "judge" if name == MQM else name


class RewardFailure(ScorekitError):
    """A service gave no score, and `reward.on_failure` is `fail`."""


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Scored | Failed]] = field(default_factory=dict)


class RewardServices(Protocol):
    """The services that a batch uses.

    needed: those with a weight.
    settle: replaces text errors in the results of a service by source errors, and raises what
    `SampleGroup.result` raises.
    """

    @property
    def needed(self) -> tuple[ServiceName, ...]: ...

    def ask(
        self, name: ServiceName, samples: Sequence[SampleForScoring]
    ) -> Future[RewardOutput]: ...

    def deadline_s(self, name: ServiceName) -> float: ...

    def settle(
        self, name: ServiceName, samples: list[SampleForScoring], results: list[Scored | Failed]
    ) -> None: ...


class RewardBatch:
    """The groups of a batch, each sent to all its services when it is submitted.

    A service is skipped for the rest of the batch if it fails a group (after the client's retries
    until the deadline) and has answered nothing since that group was submitted, or for as long as
    that deadline: the groups that wait for it fail at once. The next batch tries it again.
    """

    def __init__(
        self,
        services: RewardServices,
        service_names: tuple[ServiceName, ...],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start a batch without groups.

        should_stop: returns whether the run should end. Then a service that takes long is skipped,
        and `was_stopped` says that the scores may be missing for that reason.
        """
        self.services, self.service_names, self.should_stop = services, service_names, should_stop
        self.was_stopped = False
        self._started = time.monotonic()
        # The client's thread (`_note`) owns the next two. Waiting threads only read them, and may
        # see an answer a moment late.
        self._answered = dict.fromkeys(service_names, self._started)  # time of the last answer
        self._silent_s = dict.fromkeys(service_names, 0.0)  # from then to the last failure
        self._skipped_services: dict[ServiceName, str] = {}

    def submit(self, texts: Sequence[Text]) -> SampleGroup:
        """Request the scores of texts. Requests never have a reference."""
        samples = [_sample(*text) for text in texts]
        group = SampleGroup(self, samples, time.monotonic())
        for name in self.service_names:
            if name not in self._skipped_services:
                future = group.futures[name] = self.services.ask(name, samples)
                future.add_done_callback(partial(self._note, name))
        return group

    def results(self, name: ServiceName, group: SampleGroup) -> list[Scored | Failed]:
        """Return the results of one service for a group; all failed if it is skipped or fails."""
        future, count = group.futures.get(name), len(group.samples)
        if future is None or (name in self._skipped_services and not future.done()):
            if future is not None:
                future.cancel()
            return _all_failed(count, f"skipped for this batch: {self._skipped_services[name]}")
        try:
            results = self._wait(name, future).metadata
            if len(results) != count:
                raise ScorekitError(f"{name}: {len(results)} results, {count} samples")
        except Exception as error:
            if name in self.services.needed and _is_final(error):
                raise
            if self._answered[name] <= group.submitted or self._is_silent(name):
                self.give_up(name, str(error) or type(error).__name__)
            else:
                log.warning("%s: no scores for %d samples: %s", name, count, log_words(error))
            return _all_failed(count, str(error))
        if not any(map(_is_answer, results)) and self._is_silent(name):
            self.give_up(name, f"no answer in {self._silent_s[name]:.0f} s")
        return results

    def _wait(self, name: ServiceName, future: Future[RewardOutput]) -> RewardOutput:
        """Return the result, and log warnings while waiting."""
        started, next_warning_s = time.monotonic(), _FIRST_WARNING_S
        while not wait([future], timeout=_TICK_S).done:
            waited = time.monotonic() - started
            if self.should_stop() and waited >= _CANCEL_AFTER_S:
                self.was_stopped = True
                future.cancel()
                raise ServiceUnreachable(name, "the run is to end")
            if waited >= next_warning_s:
                log.warning(
                    "%s has not answered for %.0f s. Retries go on until reward.deadline_s (%g)",
                    name,
                    waited,
                    self.services.deadline_s(name),
                )
                next_warning_s *= 2
        return future.result()

    def give_up(self, name: ServiceName, reason: str) -> None:
        """Skip this service for the rest of the batch, and wait for none of its answers."""
        if name not in self._skipped_services:
            self._skipped_services[name] = reason
            log.warning("%s is skipped for this batch: %s", name, log_words(reason))

    def _is_silent(self, name: ServiceName) -> bool:
        return self._silent_s[name] >= self.services.deadline_s(name)

    def _note(self, name: ServiceName, future: Future[RewardOutput]) -> None:
        """Record the time of an answer; runs in the client's thread."""
        if future.cancelled():
            return
        now = time.monotonic()
        if future.exception() is None and any(map(_is_answer, future.result().metadata)):
            self._answered[name] = now
        self._silent_s[name] = now - self._answered[name]


@dataclass(slots=True)
class SampleGroup:
    """Samples that have been sent to the services.

    submitted: time.monotonic().
    """

    batch: RewardBatch
    samples: list[SampleForScoring]
    submitted: float
    futures: dict[ServiceName, Future[RewardOutput]] = field(default_factory=dict)

    def result(self) -> Scores:
        """Wait for the answers.

        Raises RewardFailure if `on_failure` is `fail`, and RequestError if a service refuses
        permanently (a wrong key, a wrong option).
        """
        scores = Scores({name: self.batch.results(name, self) for name in self.batch.service_names})
        for name, results in scores.results.items():
            self.batch.services.settle(name, self.samples, results)
        return scores


def _sample(src: str, mt: str, src_lang: str = "", tgt_lang: str = "") -> SampleForScoring:
    return SampleForScoring(src, mt, src_lang=src_lang or None, tgt_lang=tgt_lang or None)


def is_truncated(result: Scored) -> bool:
    """Return whether the model read less than the full source and translation."""
    return result.truncated.src or result.truncated.mt


def _is_final(error: Exception) -> bool:
    """Return whether a retry is useless: a refusal, or an error in this program."""
    if isinstance(error, RequestError):
        return not error.retryable
    return not isinstance(error, ServiceUnreachable)


def _is_answer(result: Scored | Failed) -> bool:
    """Return whether the service processed the sample: a score, or a permanent failure."""
    return isinstance(result, Scored) or not result.error.retryable


def _all_failed(count: int, message: str) -> list[Scored | Failed]:
    return [failure("upstream", message, retryable=True) for _ in range(count)]


def failure(type: str, message: str, *, retryable: bool) -> Failed:
    """Return the result of a sample without a score."""
    error = WireError(type=type, message=message, retryable=retryable)
    return Failed(id=None, ok=False, error=error)


#: A source that is refused with this translation is refused with any.
_SHORTEST = "."

Ask = Callable[[ServiceName, Sequence[SampleForScoring]], Future[RewardOutput]]


class SourceCheck:
    """Scores sources with the shortest translation, and caches the answers."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._cache: dict[tuple[ServiceName, SampleForScoring], Failed | None] = {}

    def refusals(
        self, name: ServiceName, sources: Sequence[SampleForScoring]
    ) -> dict[SampleForScoring, Failed]:
        """Return source (`only_source`) -> why it has no score with the shortest translation.

        That is a failure of the type `bad_source`, or a failure of the service, which leaves it
        open. Sources with a score are left out.
        """
        missing = [src for src in dict.fromkeys(sources) if (name, src) not in self._cache]
        service_failures: dict[SampleForScoring, Failed] = {}
        for src, result in zip(missing, self._results(name, missing), strict=True):
            if not isinstance(result, Failed):
                self._cache[name, src] = None
            elif result.error.type in TEXT_ERROR_TYPES:
                reason = f"{result.error.type}: {result.error.message}"
                self._cache[name, src] = failure(BAD_SOURCE, reason, retryable=False)
            else:
                service_failures[src] = result
        cached = {src: self._cache.get((name, src)) for src in sources}
        return {
            src: failed for src, failed in cached.items() if failed is not None
        } | service_failures

    def _results(
        self, name: ServiceName, sources: Sequence[SampleForScoring]
    ) -> Sequence[Scored | Failed]:
        if not sources:
            return []
        try:
            return self._ask(name, sources).result().metadata
        except (ServiceUnreachable, RequestError) as error:
            if isinstance(error, RequestError) and not error.retryable:
                raise
            return [failure("upstream", str(error), retryable=True)] * len(sources)

    def attribute(
        self, name: ServiceName, samples: Sequence[SampleForScoring], results: list[Scored | Failed]
    ) -> None:
        """Replace text failures by `refusals`; those that remain are caused by the translation."""
        text_failures = [
            index
            for index, result in enumerate(results)
            if isinstance(result, Failed) and result.error.type in TEXT_ERROR_TYPES
        ]
        source_of = {index: only_source(samples[index]) for index in text_failures}
        sources = sorted(set(source_of.values()), key=lambda source: source.src)
        new = [src for src in sources if (name, src) not in self._cache]
        refused = self.refusals(name, sources)
        bad = [src for src in new if src in refused and refused[src].error.type == BAD_SOURCE]
        if bad:
            log.warning(
                "%s: no translation of %d sources can be scored (%s). They give no reward.",
                name,
                len(bad),
                log_words(refused[bad[0]].error.message),
            )
        for index in text_failures:
            results[index] = refused.get(source_of[index], results[index])


def only_source(sample: SampleForScoring) -> SampleForScoring:
    """Return the sample with the shortest translation instead of its own."""
    return replace(sample, mt=_SHORTEST)
