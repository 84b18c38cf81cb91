"""Sources that a service refuses with any translation. The policy did not write them, so it gets
no penalty for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ServiceUnreachable
from scorekit.rewards.results import log_words
from scorekit.schemas import Failed, Scored
from scorekit.scorers import RewardOutput, SampleForScoring
from trainer.translation.rewards.reward_batch import BAD_SOURCE, ServiceName, failure

log = logging.getLogger(__name__)
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
