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

#: Scores that are remembered; the ones used longest ago make room.
_REMEMBERED = 16_384


def load_scorer(
    key: str, target: str, offered: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Scorer, set[str]]:
    """The scorer behind `module:Class`, and which of the offered arguments it got.

    key: of the config, without its ending (`reward.metricx`). offered: arguments that it gets if it
    takes them by that name, they are not None, and `given`, the user's own, has none such.
    Raises UserError.
    """
    module, colon, class_name = target.partition(":")
    names = [*module.split("."), class_name]
    if not colon or not all(part.isidentifier() for part in names):
        raise UserError(
            f"{key}_urls: {target!r}: a URL begins with http://, and a scorer in this process is "
            "written module:Class"
        )
    try:
        known = inspect.signature(scorer_class(target)).parameters
        fitting = {
            name: value
            for name, value in offered.items()
            if name in known and name not in given and value is not None
        }
        return resolve_scorer(target, **fitting, **given), set(fitting)
    except UserError as error:
        raise UserError(f"{key}_urls, {key}_scorer_args: {error}") from None


class ThreadScorer:
    """A scorer in this process, asked in a thread of its own: one group after another, since a
    model need not bear two callers, and a daemon, so that it does not hold up a Ctrl-C.

    What it scored is remembered, where the config of a batch allows a cache, and equal samples of a
    batch are scored once. Every batch has to come with the same options.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer  # owner: the thread, as of `_known`; callers only put and close
        self._known: OrderedDict[SampleForScoring, Scored] = OrderedDict()
        self._work: SimpleQueue[Any] = SimpleQueue()
        #: What it says of itself, if it does.
        self.description = getattr(scorer, "description", None)
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
                    future.set_result(self._score(samples, cfg))
                except BaseException as error:
                    future.set_exception(error)

    def _score(self, samples: Sequence[SampleForScoring], cfg: ScoringConfig) -> RewardOutput:
        if not cfg.cache:
            return self._scorer.score_batch(samples, cfg)
        results: dict[SampleForScoring, Scored | Failed] = {}
        missing = []
        for sample in dict.fromkeys(samples):
            if sample in self._known:
                self._known.move_to_end(sample)
                results[sample] = self._known[sample]
            else:
                missing.append(sample)
        if missing:
            found = self._scorer.score_batch(missing, cfg).metadata
            if len(found) != len(missing):
                raise ScorekitError(
                    f"the scorer gave {len(found)} results of {len(missing)} samples"
                )
            for sample, result in zip(missing, found, strict=True):
                results[sample] = result
                if isinstance(result, Scored):
                    self._known[sample] = result.model_copy(update={"cached": True})
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return reward_output([results[sample] for sample in samples])
