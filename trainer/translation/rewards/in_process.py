"""Scorers in this process: a `module:Class` of the config, its arguments, and its cache."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from scorekit.client.remote import resolve_scorer, scorer_class
from scorekit.errors import ScorekitError, UserError
from scorekit.schemas import Failed, Scored
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    Scorer,
    ScoringConfig,
    reward_output,
)

#: Largest number of cached scores; the least recently used are dropped.
_MAX_CACHED = 16_384


def load_scorer(
    key: str, target: str, offered: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Scorer, set[str]]:
    """Return the scorer of `module:Class`, and the names of the offered arguments that it got.

    key: of the config, without its ending (`reward.metricx`).
    offered: arguments that it gets if it has a parameter of that name, they are not None, and
    `arguments` (the user's) does not set it.
    Raises UserError.
    """
    module, colon, class_name = target.partition(":")
    names = [*module.split("."), class_name]
    if not colon or not all(part.isidentifier() for part in names):
        raise UserError(
            f"{key}_urls: {target!r}: expected a URL with http:// or https://, or a scorer in this "
            "process as module:Class"
        )
    try:
        parameters = inspect.signature(scorer_class(target)).parameters
        accepted = {
            name: value
            for name, value in offered.items()
            if name in parameters and name not in arguments and value is not None
        }
        return resolve_scorer(target, **accepted, **arguments), set(accepted)
    except UserError as error:
        raise UserError(f"{key}_urls, {key}_scorer_args: {error}") from None


class ThreadScorer:
    """A scorer in this process that runs in its own thread.

    It scores one group after another, because a model may not support two callers. The thread is a
    daemon, so that it does not delay a Ctrl-C.
    Its scores are cached if the config of a batch allows it, and equal samples of a batch are
    scored once. Every batch has to have the same options.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer  # owner: the thread, as of `_cache`; callers only put and close
        self._cache: OrderedDict[SampleForScoring, Scored] = OrderedDict()
        self._work: SimpleQueue[Any] = SimpleQueue()
        #: Its description of itself, if it has one.
        self.description = getattr(scorer, "description", None)
        threading.Thread(target=self._run, name="trainer-scorer", daemon=True).start()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig
    ) -> Future[RewardOutput]:
        """Start `score_batch` after everything that was submitted before."""
        future: Future[RewardOutput] = Future()
        self._work.put((future, samples, cfg))
        return future

    def close(self) -> None:
        """End the thread after everything that was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, samples, cfg = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._score(samples, cfg))
                except BaseException as error:
                    future.set_exception(error)

    def _score(self, samples: Sequence[SampleForScoring], cfg: ScoringConfig) -> RewardOutput:
        if not cfg.cache:
            return self._scorer.score_batch(samples, cfg)
        results: dict[SampleForScoring, Scored | Failed] = {}
        missing = []
        for sample in dict.fromkeys(samples):
            if sample in self._cache:
                self._cache.move_to_end(sample)
                results[sample] = self._cache[sample]
            else:
                missing.append(sample)
        if missing:
            scored = self._scorer.score_batch(missing, cfg).metadata
            if len(scored) != len(missing):
                raise ScorekitError(
                    f"the scorer returned {len(scored)} results for {len(missing)} samples"
                )
            for sample, result in zip(missing, scored, strict=True):
                results[sample] = result
                if isinstance(result, Scored):
                    self._cache[sample] = result.model_copy(update={"cached": True})
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return reward_output([results[sample] for sample in samples])
