"""Sources that a service refuses whatever the translation: never charged to the policy, which did
not write them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, ServiceUnreachable
from scorekit.schemas import Failed, Scored, WireError
from scorekit.scorers import RewardOutput, SampleForScoring
from trainer.translation.rewards.score_batch import BAD_SOURCE, ServiceName

log = logging.getLogger(__name__)
#: What is refused beside this translation is refused beside any.
_SHORTEST = "."

Ask = Callable[[ServiceName, Sequence[SampleForScoring]], Future[RewardOutput]]


class SourceCheck:
    """Asks a service for a source with the shortest translation; its answers are kept."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[tuple[ServiceName, SampleForScoring], Failed | None] = {}

    def refusals(
        self, name: ServiceName, sources: Sequence[SampleForScoring]
    ) -> dict[SampleForScoring, Failed]:
        """Source (`only_source`) -> why it has no score with the shortest translation: a failure
        of the type `bad_source`, or that of the service, which did not say. Sources that are scored
        lack."""
        asked = [src for src in dict.fromkeys(sources) if (name, src) not in self._known]
        lost: dict[SampleForScoring, Failed] = {}
        for src, result in zip(asked, self._results(name, asked), strict=True):
            if not isinstance(result, Failed):
                self._known[name, src] = None
            elif result.error.type in TEXT_ERROR_TYPES:
                said = f"{result.error.type}: {result.error.message}"
                self._known[name, src] = _failed(BAD_SOURCE, said, retryable=False)
            else:
                lost[src] = result
        known = {src: self._known.get((name, src)) for src in sources}
        return {src: failed for src, failed in known.items() if failed is not None} | lost

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
            return [_failed("upstream", str(error), retryable=True)] * len(sources)

    def attribute(
        self, name: ServiceName, samples: Sequence[SampleForScoring], results: list[Scored | Failed]
    ) -> None:
        """Put `refusals` in the place of the failures that stand for a text's fault: what is left
        of those is the translation's own."""
        blamed = [
            place
            for place, result in enumerate(results)
            if isinstance(result, Failed) and result.error.type in TEXT_ERROR_TYPES
        ]
        source_of = {place: only_source(samples[place]) for place in blamed}
        sources = sorted(set(source_of.values()), key=lambda source: source.src)
        new = [src for src in sources if (name, src) not in self._known]
        refused = self.refusals(name, sources)
        bad = [src for src in new if src in refused and refused[src].error.type == BAD_SOURCE]
        if bad:
            log.warning(
                "%s: no translation of %d sources can be scored (%s): their samples have no reward",
                name,
                len(bad),
                refused[bad[0]].error.message,
            )
        for place in blamed:
            results[place] = refused.get(source_of[place], results[place])


def only_source(sample: SampleForScoring) -> SampleForScoring:
    """The sample with the shortest translation in place of its own."""
    return replace(sample, mt=_SHORTEST)


def _failed(type: str, message: str, *, retryable: bool) -> Failed:
    error = WireError(type=type, message=message, retryable=retryable)
    return Failed(id=None, ok=False, error=error)
