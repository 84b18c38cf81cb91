"""Ask the upstream LLM, once more if its answer is not the required JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

import structlog

from scorekit.errors import SampleError, UserError
from scorekit.llm import LLMClient, LLMError, Message, Sampling, parse_json
from scorekit.llm.errors import LLM_ERROR_TYPES, MISTAKES, OperatorMistake
from services.judge.mqm import MqmTask
from services.judge.rubrics import Rubric
from services.judge.spending import Spending

log = structlog.get_logger()

#: Largest number of characters per token of an answer; white-space tokens are the longest. A longer
#: answer ignored max_tokens, and parsing it would delay other requests.
_MAX_CHARS_PER_TOKEN = 128
#: Appended for the retry after an answer that was not the required JSON.
_RETRY_NOTE = (
    "\n\nAn earlier answer was not the JSON asked for. Answer with one JSON object, nothing "
    "before or after it."
)


#: A task of the judge: a rubric, or the errors of a translation.
JudgeTask = Rubric | MqmTask


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


class _NoVerdict(Exception):
    """Raised if the LLM's answer contains no verdict."""

    def __init__(self, error: LLMError) -> None:
        super().__init__(error)
        self.reason = error.message
        self.is_cut = error.type == "length"


async def ask(
    client: LLMClient,
    question: JudgeRequest,
    sampling: Sampling,
    request_id: str,
    spending: Spending,
) -> Any:
    """Return the parsed answer of the LLM. spending: counts each answer.

    Raises SampleError, which callers see. It contains neither the upstream's address nor its
    answer; both are in the log, under the id that the message names."""
    task, texts, images = question.task, question.texts, question.image_parts
    try:
        try:
            messages = task.messages(texts, images)
            return await _once(client, question, sampling, messages, request_id, spending)
        except _NoVerdict as no_verdict:
            if no_verdict.is_cut:
                raise
            messages = task.messages(texts, images, _RETRY_NOTE)
            retry_id = f"{request_id}-again"
            return await _once(client, question, sampling, messages, retry_id, spending)
    except _NoVerdict as no_verdict:
        log.warning("no_verdict", upstream_request=request_id, reason=no_verdict.reason[:300])
        raise _no_verdict(no_verdict, sampling.max_tokens, request_id) from None
    except (LLMError, UserError) as error:
        log.warning(
            "upstream_failed",
            upstream=client.base_url,
            upstream_request=request_id,
            error=str(error),
        )
        raise _failed(error, client.model, request_id) from None


def _no_verdict(error: _NoVerdict, max_tokens: int, request_id: str) -> SampleError:
    if error.is_cut:
        message = f"the judge's JSON was cut at {max_tokens} tokens: increase options.max_tokens"
        return SampleError("model_failure", message)
    message = "the judge's answer contains no verdict, even after a retry"
    return SampleError("model_failure", f"{message} (the service's log: {request_id})")


def _failed(error: LLMError | UserError, model: str, request_id: str) -> SampleError:
    """Return the error that a caller may see for a failure of the upstream server."""
    log_reference = f"(the service's log: {request_id})"
    if isinstance(error, UserError):  # the operator must fix it
        mistake_kind = error.kind if isinstance(error, OperatorMistake) else "setup"
        mistake = MISTAKES[mistake_kind] + (f" {model!r}" if mistake_kind == "model" else "")
        return SampleError(
            "upstream", f"the upstream server: {mistake} {log_reference}", retryable=False
        )
    if error.type == "overlong":
        return SampleError("overlong", f"{LLM_ERROR_TYPES['overlong']} {log_reference}")
    status = "" if error.status is None else f", HTTP {error.status}"
    message = f"{LLM_ERROR_TYPES[error.type]}{status} {log_reference}"
    return SampleError("upstream", message, retryable=error.retryable)


async def _once(
    client: LLMClient,
    question: JudgeRequest,
    sampling: Sampling,
    messages: list[Message],
    request_id: str,
    spending: Spending,
) -> Any:
    schema = question.task.schema_
    (choice,) = await client.chat(
        messages,
        sampling,
        request_id=request_id,
        json_schema=schema,
        deadline_s=question.deadline_s,
    )
    spending.note(choice)
    try:
        if len(choice.text) > (max_chars := _MAX_CHARS_PER_TOKEN * sampling.max_tokens):
            message = f"{len(choice.text)} characters, at most {max_chars} expected"
            raise LLMError("malformed", message)
        return question.task.read(parse_json(choice, schema), question.texts)
    except LLMError as error:
        raise _NoVerdict(error) from None
