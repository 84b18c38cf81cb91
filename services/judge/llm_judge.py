"""Ask the upstream LLM, once more if its answer is not the required JSON, and count what it costs.

The calls and tokens of the upstream server are counted for each sample and for /metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import structlog
from prometheus_client import Counter

from scorekit.errors import SampleError, UserError
from scorekit.llm import Choice, LLMClient, LLMError, Message, Sampling, parse_json
from scorekit.llm.errors import CAUSES, sample_error
from scorekit.server.backend import Worker
from services.judge.mqm import MqmTask
from services.judge.rubrics import Rubric

log = structlog.get_logger()

#: Largest number of characters per token of an answer; white-space tokens are the longest. A longer
#: answer ignored max_tokens, and parsing it would delay other requests.
_MAX_CHARS_PER_TOKEN = 128
#: Appended for the retry after an answer that was not the required JSON.
_RETRY_NOTE = (
    "\n\nAn earlier answer was not the JSON asked for. Answer with one JSON object, nothing "
    "before or after it."
)
#: Label of models that the operator did not name. Callers can name any model, and each label is a
#: time series.
OTHER = "other"
#: A task of the judge: a rubric, or the errors of a translation.
JudgeTask = Rubric | MqmTask


class SharedWorker:
    """The worker of a sample: it is released while each of the sample's votes pauses or has ended.

    Used in the event loop of the upstream requests alone."""

    def __init__(self, worker: Worker, votes: int) -> None:
        self._worker = worker
        self._num_active = votes

    def count(self, change: int) -> None:
        """Note that a vote goes on (1), or that it pauses or has ended (-1)."""
        self._num_active += change
        if not self._num_active:
            self._worker.release()
        elif self._num_active == change:
            self._worker.resume()


class VoteSlot:
    """The part of one vote in the worker of its sample (`llm.limits.PausableSlot`)."""

    def __init__(self, worker: SharedWorker) -> None:
        self._worker = worker
        self._is_active = True

    def release(self) -> None:
        """Note that the vote pauses or has ended; a second call does nothing."""
        if self._is_active:
            self._is_active = False
            self._worker.count(-1)

    async def acquire(self, is_first: bool = False) -> None:
        """Note that the vote goes on, which it may at once."""
        if not self._is_active:
            self._is_active = True
            self._worker.count(1)


class JudgeRequest(NamedTuple):
    """A prepared sample, for which the LLM is asked `votes` times."""

    task: JudgeTask
    texts: dict[str, str]
    image_parts: list[dict[str, Any]]
    model: str
    sampling: Sampling
    votes: int = 1
    #: Seconds that the caller waits.
    deadline_s: float | None = None
    #: Whether the caller still waits; None: it does.
    is_wanted: Callable[[], bool] | None = None
    worker: SharedWorker | None = None


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


class _NoVerdict(Exception):
    """Raised if the LLM's answer contains no verdict."""

    def __init__(self, error: LLMError) -> None:
        super().__init__(error)
        self.reason = error.message
        self.is_cut = error.type == "length"
        self.cause = error.cause
        #: Whether another answer may have one.
        self.may_pass = error.retryable


async def ask(
    client: LLMClient,
    question: JudgeRequest,
    sampling: Sampling,
    request_id: str,
    spending: Spending,
    slot: VoteSlot | None = None,
) -> Any:
    """Return the parsed answer of the LLM.

    spending: counts each answer.
    slot: given up in pauses.

    Raises SampleError, which callers see. It contains neither the upstream's address nor its
    answer; both are in the log, under the id that the message names."""
    task, texts, images = question.task, question.texts, question.image_parts
    try:
        try:
            messages = task.messages(texts, images)
            return await _once(client, question, sampling, messages, request_id, spending, slot)
        except _NoVerdict as no_verdict:
            if not no_verdict.may_pass:  # the same again, and paid again
                raise
            messages = task.messages(texts, images, _RETRY_NOTE)
            retry_id = f"{request_id}-again"
            return await _once(client, question, sampling, messages, retry_id, spending, slot)
    except _NoVerdict as no_verdict:
        log.warning("no_verdict", upstream_request=request_id, reason=no_verdict.reason[:300])
        raise _no_verdict(no_verdict, sampling.max_tokens, request_id) from None
    except (LLMError, UserError) as error:
        has_left = isinstance(error, LLMError) and error.cause == "left"
        (log.info if has_left else log.warning)(
            "upstream_failed",
            upstream=client.base_url,
            upstream_request=request_id,
            error=str(error),
        )
        raise sample_error(error, client.model, request_id) from None


def _no_verdict(error: _NoVerdict, max_tokens: int, request_id: str) -> SampleError:
    if error.cause is not None:
        message = f"no verdict: {CAUSES[error.cause]} (max_tokens {max_tokens}; the service's log: "
        return SampleError("model_failure", f"{message}{request_id})")
    if error.is_cut:
        message = f"the judge's JSON was cut at {max_tokens} tokens: increase options.max_tokens"
        return SampleError("model_failure", message)
    message = "the judge's answer contains no verdict, even after a retry"
    return SampleError("model_failure", f"{message} (the service's log: {request_id})")


async def _once(
    client: LLMClient,
    question: JudgeRequest,
    sampling: Sampling,
    messages: list[Message],
    request_id: str,
    spending: Spending,
    slot: VoteSlot | None,
) -> Any:
    schema = question.task.schema_
    (choice,) = await client.chat(
        messages,
        sampling,
        request_id=request_id,
        json_schema=schema,
        deadline_s=question.deadline_s,
        is_wanted=question.is_wanted,
        outer_slots=() if slot is None else (slot,),
    )
    spending.note(choice)
    try:
        if len(choice.text) > (max_chars := _MAX_CHARS_PER_TOKEN * sampling.max_tokens):
            message = f"{len(choice.text)} characters, at most {max_chars} expected"
            raise LLMError("malformed", message, retryable=True)
        return question.task.read(parse_json(choice, schema), question.texts)
    except LLMError as error:
        raise _NoVerdict(error) from None
