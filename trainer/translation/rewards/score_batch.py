"""A batch of samples on its way through the reward services: who is asked, who is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ScorekitError, ServiceUnreachable
from scorekit.schemas import Failed, Scored, WireError
from scorekit.scorers import RewardOutput, SampleForScoring

log = logging.getLogger(__name__)
#: As its `/v1/info` says, and its keys in the config begin; of a judge, what it is asked (`host`).
ServiceName = str
#: What is asked of a judge: error spans, and the verdict of a rubric.
MQM, VERDICT = "mqm", "judge"
#: Source and translation, and, where they are known, their languages.
Text = tuple[str, str] | tuple[str, str, str, str]
#: Type of a failure that is the source's: whatever the translation, it would be refused.
BAD_SOURCE = "bad_source"
_OF_THE_TEXTS = {*TEXT_ERROR_TYPES, BAD_SOURCE}
#: Seconds between two looks at an answer that is waited for; after which it is first told, and
#: after which it is left where the run is to end.
_TICK_S = 1.0
_TOLD_AFTER_S = 10.0
_HURRY_AFTER_S = 5.0


def host(name: ServiceName) -> str:
    """The service that is asked, as its `/v1/info` calls it."""
    return "judge" if name == MQM else name


class RewardFailure(ScorekitError):
    """A score could not be had, and `reward.on_failure` is `fail`."""


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Scored | Failed]] = field(default_factory=dict)


class Services(Protocol):
    """Whom a batch asks. needed: those with a weight. fails_run: a score that one of them failed to
    give ends the run. attribute: puts the source's fault in place of the text's in `results`."""

    @property
    def needed(self) -> tuple[ServiceName, ...]: ...

    @property
    def fails_run(self) -> bool: ...

    def ask(
        self, name: ServiceName, samples: Sequence[SampleForScoring]
    ) -> Future[RewardOutput]: ...

    def patience(self, name: ServiceName) -> float: ...

    def tell_truncated(self, name: ServiceName, results: Sequence[Scored | Failed]) -> None: ...

    def attribute(
        self,
        name: ServiceName,
        samples: Sequence[SampleForScoring],
        results: list[Scored | Failed],
    ) -> None: ...


class AskedBatch:
    """The groups of a batch, each put to its services at once and as soon as it is submitted.

    A service that fails a group (the client has then asked again until the deadline) and has
    answered nothing since that group was submitted, or for as long as that deadline, is given up:
    the groups that wait for it fail at once. The next batch asks it again.
    """

    def __init__(
        self,
        services: Services,
        asked: tuple[ServiceName, ...],
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """hurry: whether nobody wants to wait any more; then a service that lets wait for long is
        given up, and `hurried` says that its scores may not be missing otherwise."""
        self.services, self.asked, self.hurry, self.hurried = services, asked, hurry, False
        self._started = time.monotonic()
        # Owner of the next two: the client's thread (`_note`). Who waits only reads them, and may
        # see an answer a moment late.
        self._answered = dict.fromkeys(asked, self._started)  # when the service last did
        self._silent_s = dict.fromkeys(asked, 0.0)  # since then, when it failed
        self._given_up: dict[ServiceName, str] = {}

    def submit(self, texts: Sequence[Text]) -> Group:
        """Ask for the scores of texts. Requests never carry a reference."""
        samples = [_sample(*text) for text in texts]
        group = Group(self, samples, time.monotonic())
        for name in self.asked:
            if name not in self._given_up:
                future = group.futures[name] = self.services.ask(name, samples)
                future.add_done_callback(partial(self._note, name))
        return group

    def results(self, name: ServiceName, group: Group) -> list[Scored | Failed]:
        """Results of one service for a group; all failed where it cannot be had in time."""
        future, count = group.futures.get(name), len(group.samples)
        if future is None or (name in self._given_up and not future.done()):
            if future is not None:
                future.cancel()
            return _all_failed(count, f"given up for this batch: {self._given_up[name]}")
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
                log.warning("%s: no scores for %d samples: %s", name, count, error)
            return _all_failed(count, str(error))
        if not any(map(_is_answer, results)) and self._is_silent(name):
            self.give_up(name, f"no answer in {self._silent_s[name]:.0f} s")
        return results

    def _wait(self, name: ServiceName, future: Future[RewardOutput]) -> RewardOutput:
        """Its result; says meanwhile that it is waited for."""
        started, told = time.monotonic(), _TOLD_AFTER_S
        while not wait([future], timeout=_TICK_S).done:
            waited = time.monotonic() - started
            if self.hurry() and waited >= _HURRY_AFTER_S:
                self.hurried = True
                future.cancel()
                raise ServiceUnreachable(name, "the run is to end")
            if waited >= told:
                log.warning(
                    "%s has not answered for %.0f s; it is asked until reward.deadline_s (%g)",
                    name,
                    waited,
                    self.services.patience(name),
                )
                told *= 2
        return future.result()

    def give_up(self, name: ServiceName, why: str) -> None:
        """Ask this service no more in this batch, and wait for nothing that it was asked."""
        if name not in self._given_up:
            self._given_up[name] = why
            log.warning("%s is given up for this batch: %s", name, why)

    def _is_silent(self, name: ServiceName) -> bool:
        return self._silent_s[name] >= self.services.patience(name)

    def _note(self, name: ServiceName, future: Future[RewardOutput]) -> None:
        """Called in the client's thread."""
        if future.cancelled():
            return
        now = time.monotonic()
        if future.exception() is None and any(map(_is_answer, future.result().metadata)):
            self._answered[name] = now
        self._silent_s[name] = now - self._answered[name]


@dataclass(slots=True)
class Group:
    """Samples that have been put to the services. submitted: time.monotonic()."""

    batch: AskedBatch
    samples: list[SampleForScoring]
    submitted: float
    futures: dict[ServiceName, Future[RewardOutput]] = field(default_factory=dict)

    def result(self) -> Scores:
        """Wait for the answers.

        Raises RewardFailure where `on_failure` is `fail`, and RequestError where a service refuses
        for good (a wrong key, a wrong option).
        """
        services = self.batch.services
        scores = Scores({name: self.batch.results(name, self) for name in self.batch.asked})
        for name, results in scores.results.items():
            services.tell_truncated(name, results)
            if name not in services.needed:
                continue
            services.attribute(name, self.samples, results)
            if services.fails_run:
                for result in results:
                    if isinstance(result, Failed) and result.error.type not in _OF_THE_TEXTS:
                        raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")
        return scores


def _sample(src: str, mt: str, src_lang: str = "", tgt_lang: str = "") -> SampleForScoring:
    return SampleForScoring(src, mt, src_lang=src_lang or None, tgt_lang=tgt_lang or None)


def is_truncated(result: Scored) -> bool:
    """Whether the model read less than the whole source and translation."""
    return result.truncated.src or result.truncated.mt


def _is_final(error: Exception) -> bool:
    """Whether no later request could do better: a refusal, or a fault of our own."""
    if isinstance(error, RequestError):
        return not error.retryable
    return not isinstance(error, ServiceUnreachable)


def _is_answer(result: Scored | Failed) -> bool:
    """Whether the service dealt with the sample: a score, or a failure that would come again."""
    return isinstance(result, Scored) or not result.error.retryable


def _all_failed(count: int, message: str) -> list[Scored | Failed]:
    error = WireError(type="upstream", message=message, retryable=True)
    return [Failed(id=None, ok=False, error=error) for _ in range(count)]
