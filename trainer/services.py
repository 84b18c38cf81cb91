"""The reward services of a run: opened and checked once, then asked a group at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from scorekit.client import RemoteScorer
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.schemas import Failed, Info, Scored, WireError
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    Scorer,
    ScoringConfig,
    resolve_scorer,
)
from trainer.config import RewardConfig

log = logging.getLogger(__name__)
ServiceName = Literal["metricx", "xcomet"]
SERVICES: tuple[ServiceName, ...] = ("metricx", "xcomet")
#: Which direction of the score the reward's formula takes for granted.
HIGHER_IS_BETTER = {"metricx": False, "xcomet": True}
#: Seconds that a request to a service without weight may take, retries included: it is only shown.
_SHOWN_DEADLINE_S = 10.0
#: Share of samples that a model may fail to read whole before it is told.
_TRUNCATED_TOLD = 0.1


class RewardFailure(ScorekitError):
    """A score could not be had, and `reward.on_failure` is `fail`."""


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Scored | Failed]] = field(default_factory=dict)


class Rewarder:
    """The reward services of a run.

    Opening it checks that each service that is needed answers, runs the model that the config
    expects, and scores in the expected direction. A service that has a URL but no weight is asked
    only in evaluations; at its first failure, here or later, it is dropped with a warning.
    """

    def __init__(self, cfg: RewardConfig, *, caching: bool = True, offer_unneeded: bool = True):
        self.cfg = cfg
        self.scoring = ScoringConfig(
            batch_size=cfg.batch_size,
            overlong="truncate" if cfg.overlong == "truncate" else "error",
            max_input_length=cfg.max_input_length,
            cache=caching,
        )
        needed = {"metricx": cfg.needs_metricx, "xcomet": cfg.needs_xcomet}
        self.needed = tuple(name for name in SERVICES if needed[name])
        self.infos: dict[str, Info] = {}
        self._scorers: dict[ServiceName, RemoteScorer | LocalScorer] = {}
        self._told_truncated: set[ServiceName] = set()
        try:
            for name in SERVICES:
                if name in self.needed or offer_unneeded:
                    self._open(name)
        except BaseException:
            self.close()
            raise

    @property
    def available(self) -> tuple[ServiceName, ...]:
        """Services that can be asked: the needed ones, and those with a URL that answer."""
        return tuple(self._scorers)

    def close(self) -> None:
        """Close the connections; what is still asked for is given up."""
        for name in self.available:
            self.drop(name)

    def drop(self, name: ServiceName) -> None:
        """Ask this service no more."""
        self._scorers.pop(name).close()

    def batch(self, services: Sequence[ServiceName] | None = None) -> Batch:
        """A batch whose groups are put to `services` (default: the needed ones)."""
        return Batch(self, self.needed if services is None else tuple(services))

    def score(
        self, texts: Sequence[tuple[str, str]], services: Sequence[ServiceName] | None = None
    ) -> Scores:
        """A batch of one group: (source, translation) pairs. Raises what `Group.result` does."""
        return self.batch(services).submit(texts).result()

    def ask(self, name: ServiceName, samples: Sequence[SampleForScoring]) -> Future[RewardOutput]:
        """Put samples to a service; the answer is not waited for."""
        return self._scorers[name].submit_batch(samples, self.scoring)

    def tell_truncated(self, name: ServiceName, results: Sequence[Scored | Failed]) -> None:
        """Warn once where a model does not read much of what it scores."""
        flags = [is_truncated(result) for result in results if isinstance(result, Scored)]
        if name not in self._told_truncated and sum(flags) > _TRUNCATED_TOLD * len(flags):
            self._told_truncated.add(name)
            log.warning(
                "%s could not read %d of %d samples to their end; their scores are of the part "
                "that it read", name, sum(flags), len(flags),
            )  # fmt: skip

    def _open(self, name: ServiceName) -> None:
        urls: list[str] = getattr(self.cfg, f"{name}_urls") or _from_environment(name)
        needed = name in self.needed
        if not urls:
            if needed:
                raise UserError(
                    f"reward.{name}_urls is empty: name the URL of a running {name} service there "
                    f"or in {name.upper()}_URL, or set the weight of its reward to 0"
                )
            return
        try:
            self._scorers[name] = self._connect(name, urls)
        except Exception as error:  # of a service that is only shown, none may end the run
            if needed:
                raise
            log.warning("evaluations go without %s: %s", name, error)

    def _connect(self, name: ServiceName, urls: list[str]) -> RemoteScorer | LocalScorer:
        local = [url for url in urls if not url.startswith(("http://", "https://"))]
        if local:
            if len(urls) > 1:
                raise UserError(f"reward.{name}_urls: {local[0]!r} cannot stand beside another")
            return LocalScorer(self._in_process(name, local[0]))
        infos = {url: self._check(name, url) for url in urls}
        _check_agreement(name, infos)
        self.infos |= infos
        scorer = self._remote(name, urls)
        scorer.info()  # which it remembers: else each of the first groups asks
        return scorer

    def _remote(self, name: ServiceName, urls: list[str]) -> RemoteScorer:
        most = self.cfg.deadline_s if name in self.needed else _SHOWN_DEADLINE_S
        return RemoteScorer(
            urls,
            timeout_s=min(self.cfg.timeout_s, most),
            deadline_s=min(self.cfg.deadline_s, most),
        )

    def _in_process(self, name: ServiceName, target: str) -> Scorer:
        """A `module:Class`, held against the config's expectations if it describes itself."""
        module, colon, class_name = target.partition(":")
        names = [*module.split("."), class_name]
        if not colon or not all(part.isidentifier() for part in names):
            raise UserError(
                f"reward.{name}_urls: {target!r}: a URL begins with http://, and a scorer in this "
                "process is written module:Class"
            )
        scorer = resolve_scorer(target, **getattr(self.cfg, f"{name}_scorer_args"))
        description = getattr(scorer, "description", None)
        faults = []
        if description is not None:
            faults = self._mismatches(name, description)
        else:
            keys = [key for key in ("model_name", "tokenizer_name") if self._expected(name, key)]
            faults = [f"does not say what it runs: set reward.{name}_{key} to null" for key in keys]
        if faults:
            raise UserError(f"reward.{name}_urls: {target} {'; '.join(faults)}")
        return scorer

    def _check(self, name: ServiceName, url: str) -> Info:
        """`/v1/info` of one URL, held against the config's expectations."""
        try:
            with self._remote(name, [url]) as probe:
                info = probe.info()
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"reward.{name}_urls: {error}") from None
        if info.service != name:
            raise UserError(f"reward.{name}_urls: {url} is a {info.service} service")
        faults = self._mismatches(name, info)
        if faults:
            raise UserError(f"reward.{name}_urls: {url} {'; '.join(faults)}")
        return info

    def _expected(self, name: ServiceName, key: str) -> str | None:
        return getattr(self.cfg, f"{name}_{key}", None)

    def _mismatches(self, name: ServiceName, described: Any) -> list[str]:
        """What an Info, or a scorer's description with such fields, says against the config."""
        faults = []
        if described.higher_is_better != HIGHER_IS_BETTER[name]:
            faults.append(f"says higher_is_better={described.higher_is_better}")
        for key, field_name in (("model_name", "model"), ("tokenizer_name", "tokenizer")):
            expected, actual = self._expected(name, key), getattr(described, field_name)
            if expected is not None and expected != actual:
                faults.append(f"runs {actual!r}, but reward.{name}_{key} is {expected!r}")
        limit = self.cfg.max_input_length
        if limit is not None and limit > described.max_input_length:
            faults.append(
                f"reads {described.max_input_length} tokens, but reward.max_input_length is {limit}"
            )
        return faults


class Batch:
    """The groups of a batch, each put to its services at once and as soon as it is submitted.

    A service that fails a group (the client has then asked again until the deadline) and has
    answered nothing since that group was submitted is given up: the groups that wait for it fail
    at once. The next batch asks it again.
    """

    def __init__(self, rewarder: Rewarder, asked: tuple[ServiceName, ...]) -> None:
        self.rewarder, self.asked = rewarder, asked
        self._started = time.monotonic()
        self._answered = dict.fromkeys(asked, self._started)  # when the service last did
        self._given_up: dict[ServiceName, str] = {}

    def submit(self, texts: Sequence[tuple[str, str]]) -> Group:
        """Ask for the scores of (source, translation) pairs. Requests never carry a reference."""
        samples = [SampleForScoring(src, mt) for src, mt in texts]
        group = Group(self, samples, time.monotonic())
        for name in self.asked:
            future = group.futures[name] = self.rewarder.ask(name, samples)
            future.add_done_callback(partial(self._note, name))
        return group

    def results(self, name: ServiceName, group: Group) -> list[Scored | Failed]:
        """Results of one service for a group; all failed where it cannot be had in time."""
        future, count = group.futures[name], len(group.samples)
        if name in self._given_up and not future.done():
            future.cancel()
            return _all_failed(count, f"given up for this batch: {self._given_up[name]}")
        try:
            results = future.result().metadata
            if len(results) != count:
                raise ScorekitError(f"{name}: {len(results)} results, {count} samples")
        except Exception as error:
            if name not in self.rewarder.needed:
                if name in self.rewarder.available:
                    log.warning("evaluations go without %s from now on: %s", name, error)
                    self.rewarder.drop(name)
            elif not isinstance(error, ServiceUnreachable | RequestError) or (
                isinstance(error, RequestError) and not error.retryable
            ):
                raise
            elif self._answered[name] <= group.submitted:
                self._give_up(name, str(error))
            else:
                log.warning("%s: no scores for %d samples: %s", name, count, error)
            return _all_failed(count, str(error))
        silent_s = time.monotonic() - self._answered[name]
        if not any(map(_is_answer, results)) and silent_s >= self.rewarder.cfg.deadline_s:
            self._give_up(name, f"no answer in {silent_s:.0f} s")
        return results

    def _note(self, name: ServiceName, future: Future[RewardOutput]) -> None:
        """Called in the client's thread."""
        if future.cancelled() or future.exception() is not None:
            return
        if any(map(_is_answer, future.result().metadata)):
            self._answered[name] = time.monotonic()

    def _give_up(self, name: ServiceName, why: str) -> None:
        if name not in self._given_up:
            self._given_up[name] = why
            log.warning("%s is given up for this batch: %s", name, why)


@dataclass(slots=True)
class Group:
    """Samples that have been put to the services. submitted: time.monotonic()."""

    batch: Batch
    samples: list[SampleForScoring]
    submitted: float
    futures: dict[ServiceName, Future[RewardOutput]] = field(default_factory=dict)

    def result(self) -> Scores:
        """Wait for the answers.

        Raises RewardFailure where `on_failure` is `fail`, and RequestError where a service refuses
        for good (a wrong key, a wrong option).
        """
        rewarder = self.batch.rewarder
        scores = Scores({name: self.batch.results(name, self) for name in self.futures})
        for name, results in scores.results.items():
            rewarder.tell_truncated(name, results)
            if rewarder.cfg.on_failure == "fail" and name in rewarder.needed:
                for result in results:
                    if isinstance(result, Failed) and result.error.type not in TEXT_ERROR_TYPES:
                        raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")
        return scores


class LocalScorer:
    """A scorer in this process, asked in a thread of its own: one group after another, since a
    model need not bear two callers, and a daemon, so that it does not hold up a Ctrl-C."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._work: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="trainer-scorer", daemon=True).start()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig
    ) -> Future[RewardOutput]:
        """`score_batch`, begun behind what was submitted before."""
        future: Future[RewardOutput] = Future()
        self._work.put((future, samples, cfg))
        return future

    def close(self) -> None:
        """End the thread behind what was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, samples, cfg = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._scorer.score_batch(samples, cfg))
                except BaseException as error:
                    future.set_exception(error)


def is_truncated(result: Scored) -> bool:
    """Whether the model read less than the whole source and translation."""
    return result.truncated.src or result.truncated.mt


def _is_answer(result: Scored | Failed) -> bool:
    """Whether the service dealt with the sample: a score, or a failure that would come again."""
    return isinstance(result, Scored) or not result.error.retryable


def _all_failed(count: int, message: str) -> list[Scored | Failed]:
    error = WireError(type="upstream", message=message, retryable=True)
    return [Failed(id=None, ok=False, error=error) for _ in range(count)]


def _check_agreement(name: ServiceName, infos: dict[str, Info]) -> None:
    """Raise UserError where two URLs of one service would not give the same scores."""
    (first, one), *others = infos.items()
    for url, other in others:
        for key in ("model", "revision", "dtype", "tokenizer"):
            if getattr(one, key) != getattr(other, key):
                raise UserError(
                    f"reward.{name}_urls: {first} has {key} {getattr(one, key)!r}, {url} has "
                    f"{getattr(other, key)!r}: scores of one run must be of one model"
                )


def _from_environment(name: ServiceName) -> list[str]:
    value = os.environ.get(f"{name.upper()}_URL", "")
    return [url.strip() for url in value.split(",") if url.strip()]
