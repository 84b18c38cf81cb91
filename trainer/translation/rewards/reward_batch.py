"""A batch of samples that the reward services score, and the services that failed for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ScorekitError, ServiceUnreachable
from scorekit.rewards.results import log_words
from scorekit.schemas import Failed, JudgeScored, Result, Scored, WireError

log = logging.getLogger(__name__)
#: As in its `/v1/info` and its config keys; for a judge, the task (`host`).
ServiceName = str
#: Tasks of a judge: error spans, and the verdict of a rubric.
MQM, VERDICT = "mqm", "judge"
#: The composite reward of `reward.definition`, which asks services of its own.
COMPOSITE = "definition"
#: Source and translation, and, if known, their languages.
Text = tuple[str, str] | tuple[str, str, str, str]
#: A sample by its fields: those of a Text, and what the rules of a definition read (`ref`,
#: `finish_reason`).
Fields = Mapping[str, Any]
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


class Composed(Scored):
    """A composite reward as the score of a translation.

    stats: raw values of its components, and 1 or 0 for each closed gate.
    """

    stats: dict[str, float]


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Result]] = field(default_factory=dict)


class RewardServices(Protocol):
    """The services that a batch uses.

    needed: those with a weight.
    ask: sends the samples of a group to a service. groups: of each, for rules of groups.
    settle: logs what is wrong with the results of a service, and raises what `SampleGroup.result`
    raises.
    """

    @property
    def needed(self) -> tuple[ServiceName, ...]: ...

    def ask(
        self, name: ServiceName, samples: Sequence[Fields], groups: Sequence[Hashable]
    ) -> Future[list[Result]]: ...

    def deadline_s(self, name: ServiceName) -> float: ...

    def settle(
        self, name: ServiceName, samples: Sequence[Fields], results: Sequence[Result]
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

    def submit(
        self, samples: Sequence[Text | Fields], groups: Sequence[Hashable] | None = None
    ) -> SampleGroup:
        """Request the scores of samples. Services never get a reference.

        groups: of each sample, for rules of groups; None: all are of one."""
        fields = [
            sample if isinstance(sample, Mapping) else fields_of(*sample) for sample in samples
        ]
        group = SampleGroup(self, fields, time.monotonic())
        for name in self.service_names:
            if name not in self._skipped_services:
                future = self.services.ask(name, fields, groups or [0] * len(fields))
                group.futures[name] = future
                future.add_done_callback(partial(self._note, name))
        return group

    def results(self, name: ServiceName, group: SampleGroup) -> list[Result]:
        """Return the results of one service for a group; all failed if it is skipped or fails."""
        future, count = group.futures.get(name), len(group.samples)
        if future is None or (name in self._skipped_services and not future.done()):
            if future is not None:
                future.cancel()
            return _all_failed(count, f"skipped for this batch: {self._skipped_services[name]}")
        try:
            results = self._wait(name, future)
        except Exception as error:
            if name in self.services.needed and _is_final(error):
                raise
            results = _all_failed(count, str(error) or type(error).__name__)
        if not results or any(map(_is_answer, results)):
            return results
        reason = next((r.error.message for r in results if isinstance(r, Failed)), "")
        if self._answered[name] <= group.submitted or self._is_silent(name):
            self.give_up(name, reason)
        else:
            log.warning("%s: no scores for %d samples: %s", name, count, log_words(reason))
        return results

    def _wait(self, name: ServiceName, future: Future[list[Result]]) -> list[Result]:
        """Return the results, and log warnings while waiting."""
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

    def _note(self, name: ServiceName, future: Future[list[Result]]) -> None:
        """Record the time of an answer; runs in the client's thread."""
        if future.cancelled():
            return
        now = time.monotonic()
        if future.exception() is None and any(map(_is_answer, future.result())):
            self._answered[name] = now
        self._silent_s[name] = now - self._answered[name]


@dataclass(slots=True)
class SampleGroup:
    """Samples that have been sent to the services.

    submitted: time.monotonic().
    """

    batch: RewardBatch
    samples: Sequence[Fields]
    submitted: float
    futures: dict[ServiceName, Future[list[Result]]] = field(default_factory=dict)

    def result(self) -> Scores:
        """Wait for the answers.

        Raises RewardFailure if `on_failure` is `fail`, and RequestError if a service refuses
        permanently (a wrong key, a wrong option).
        """
        scores = Scores({name: self.batch.results(name, self) for name in self.batch.service_names})
        for name, results in scores.results.items():
            self.batch.services.settle(name, self.samples, results)
        return scores


def fields_of(src: str, mt: str, *languages: str) -> dict[str, Any]:
    """Return the fields of a Text; those of languages only if they are given."""
    named = dict(zip(("src_lang", "tgt_lang"), languages, strict=False))
    return {"src": src, "mt": mt} | {key: language or None for key, language in named.items()}


def is_truncated(result: Scored | JudgeScored) -> bool:
    """Return whether the model read less than the full source and translation."""
    return isinstance(result, Scored) and (result.truncated.src or result.truncated.mt)


def _is_final(error: Exception) -> bool:
    """Return whether a retry is useless: a refusal, or an error in this program."""
    if isinstance(error, RequestError):
        return not error.retryable
    return not isinstance(error, ServiceUnreachable)


def _is_answer(result: Result) -> bool:
    """Return whether the service processed the sample: a score, or a permanent failure."""
    return not isinstance(result, Failed) or not result.error.retryable


def _all_failed(count: int, message: str) -> list[Result]:
    return [failure("upstream", message, retryable=True) for _ in range(count)]


def failure(type: str, message: str, *, retryable: bool) -> Failed:
    """Return the result of a sample without a score."""
    error = WireError(type=type, message=message, retryable=retryable)
    return Failed(id=None, ok=False, error=error)
