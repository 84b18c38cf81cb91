"""Count the calls and tokens of the upstream server, for each sample and for /metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from prometheus_client import Counter

from scorekit.llm import Choice

#: Label of models that the operator did not name. Callers can name any model, and each label is a
#: time series.
OTHER = "other"


class UpstreamCounters:
    """Counters of all answers of the upstream server, with or without a verdict.

    models: models with their own label.
    """

    def __init__(self, models: Collection[str]) -> None:
        self._models = frozenset(models)
        self.answers = Counter(
            "scorekit_upstream_answers",
            "Answers of the upstream server, by model; counted: whether it told their tokens.",
            ["model", "counted"],
            registry=None,
        )
        self.tokens = Counter(
            "scorekit_upstream_tokens",
            "Tokens at the upstream server, by model; kind: prompt or completion.",
            ["model", "kind"],
            registry=None,
        )
        for model in sorted(self._models):
            for counted in ("yes", "no"):
                self.answers.labels(model, counted)
            for kind in ("prompt", "completion"):
                self.tokens.labels(model, kind)

    def note(self, model: str, choice: Choice) -> None:
        """Count one answer."""
        label = model if model in self._models else OTHER
        prompt, completion = choice.prompt_tokens, choice.completion_tokens
        is_counted = prompt is not None and completion is not None
        self.answers.labels(label, "yes" if is_counted else "no").inc()
        self.tokens.labels(label, "prompt").inc(prompt or 0)
        self.tokens.labels(label, "completion").inc(completion or 0)


class Spending:
    """Usage of the upstream answers for one sample so far, even if it fails later.

    The cost of a request that was cancelled is unknown and not counted.
    """

    def __init__(self, model: str, counters: UpstreamCounters) -> None:
        self._model, self._counters = model, counters
        self._answers: list[Choice] = []

    def note(self, choice: Choice) -> None:
        """Count one answer."""
        self._counters.note(self._model, choice)
        self._answers.append(choice)

    def fields(self) -> dict[str, Any]:
        """Return the result's fields: `upstream_calls`, and `usage` if the server counted all
        answers."""
        if not self._answers:
            return {}
        usage_fields: dict[str, Any] = {"upstream_calls": len(self._answers)}
        prompt = [choice.prompt_tokens for choice in self._answers]
        completion = [choice.completion_tokens for choice in self._answers]
        if None not in prompt and None not in completion:
            sums = [sum(count or 0 for count in counts) for counts in (prompt, completion)]
            usage_fields["usage"] = dict(
                zip(("prompt_tokens", "completion_tokens"), sums, strict=True)
            )
        return usage_fields
