"""One question to the upstream LLM: asked once more where the answer is not what was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog

from scorekit.errors import SampleError, UserError
from scorekit.llm import LLMClient, LLMError, Message, Sampling, parse_json
from scorekit.llm.errors import LLM_ERROR_SENTENCES, MISTAKES, OperatorMistake
from scorekit.schemas import TaskInfo
from services.judge.spending import Spending

log = structlog.get_logger()

T = TypeVar("T")
#: Characters of an answer for each token that it may have. Tokens of white space are the longest;
#: a server that sends more knows no limit, and to read all of it would hold up the others.
_CHARS_A_TOKEN = 128
#: Added for the second try after an answer that was not the JSON asked for.
_AGAIN = (
    "\n\nAn earlier answer was not the JSON asked for. Answer with one JSON object, nothing "
    "before or after it."
)


class JudgeTask(Protocol):
    """What the judge can be asked: a rubric, or the errors of a translation."""

    @property
    def digest(self) -> str:
        """Of all that shapes an answer."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""
        ...

    @property
    def schema_(self) -> dict[str, Any]:
        """JSON schema of the answer."""
        ...

    @property
    def info(self) -> TaskInfo:
        """What its score means."""
        ...

    def temperature_of(self, votes: int) -> float:
        """What is sampled with where the request says nothing."""
        ...

    def prepare(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The sample's texts. Raises SampleError where they do not fit."""
        ...

    def pictures(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """The sample's pictures as parts of a message. Raises SampleError."""
        ...

    def unasked(self, texts: Mapping[str, str]) -> dict[str, Any] | None:
        """The outcome where nobody has to be asked."""
        ...

    def messages(
        self, texts: Mapping[str, str], pictures: Sequence[dict[str, Any]] = (), again: str = ""
    ) -> list[Message]:
        """The chat. again: its last words, where it is asked a second time."""
        ...

    def read(self, answer: Mapping[str, Any], texts: Mapping[str, str]) -> Any:
        """What an answer that fits the schema says. Raises LLMError where it contradicts itself."""
        ...

    def outcome(self, answers: Sequence[Any], texts: Mapping[str, str]) -> dict[str, Any]:
        """What is told of what was read."""
        ...


class JudgeQuestion(NamedTuple):
    """A sample of the judge, ready to be asked about `votes` times."""

    task: JudgeTask
    texts: dict[str, str]
    pictures: list[dict[str, Any]]
    model: str
    sampling: Sampling
    votes: int = 1
    #: How long the caller waits.
    deadline_s: float | None = None


class _Unfit(Exception):
    """The LLM answered, but gave no verdict."""

    def __init__(self, error: LLMError) -> None:
        super().__init__(error)
        self.why = error.message
        self.is_cut = error.type == "length"


async def ask(
    client: LLMClient,
    question: JudgeQuestion,
    sampling: Sampling,
    request_id: str,
    spending: Spending,
) -> Any:
    """What was read from the LLM's answer. spending: counts each answer. Raises SampleError, which
    callers see: neither the upstream's address nor a word of its answer is in it. Those are in the
    log, under the id that the message names."""
    task, texts, pictures = question.task, question.texts, question.pictures
    try:
        try:
            messages = task.messages(texts, pictures)
            return await _once(client, question, sampling, messages, request_id, spending)
        except _Unfit as unfit:
            if unfit.is_cut:
                raise
            messages = task.messages(texts, pictures, _AGAIN)
            again = f"{request_id}-again"
            return await _once(client, question, sampling, messages, again, spending)
    except _Unfit as unfit:
        log.warning("no_verdict", upstream_request=request_id, reason=unfit.why[:300])
        raise _no_verdict(unfit, sampling.max_tokens, request_id) from None
    except (LLMError, UserError) as error:
        log.warning(
            "upstream_failed",
            upstream=client.base_url,
            upstream_request=request_id,
            error=str(error),
        )
        raise _failed(error, client.model, request_id) from None


def _no_verdict(unfit: _Unfit, max_tokens: int, request_id: str) -> SampleError:
    if unfit.is_cut:
        cut = f"the judge's JSON was cut at {max_tokens} tokens: raise options.max_tokens"
        return SampleError("model_failure", cut)
    said = "the judge's answer, asked for twice, is no verdict"
    return SampleError("model_failure", f"{said} (the service's log: {request_id})")


def _failed(error: LLMError | UserError, model: str, request_id: str) -> SampleError:
    """Return what a caller may know of a failure of the upstream server."""
    where = f"(the service's log: {request_id})"
    if isinstance(error, UserError):  # the operator's to mend
        kind = error.kind if isinstance(error, OperatorMistake) else "setup"
        said = MISTAKES[kind] + (f" {model!r}" if kind == "model" else "")
        return SampleError("upstream", f"the upstream server: {said} {where}", retryable=False)
    if error.type == "overlong":
        return SampleError("overlong", f"{LLM_ERROR_SENTENCES['overlong']} {where}")
    status = "" if error.status is None else f", HTTP {error.status}"
    message = f"{LLM_ERROR_SENTENCES[error.type]}{status} {where}"
    return SampleError("upstream", message, retryable=error.retryable)


async def _once(
    client: LLMClient,
    question: JudgeQuestion,
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
        if len(choice.text) > (most := _CHARS_A_TOKEN * sampling.max_tokens):
            said = f"{len(choice.text)} characters, {most} at most for {sampling.max_tokens} tokens"
            raise LLMError("malformed", said)
        return question.task.read(parse_json(choice, schema), question.texts)
    except LLMError as error:
        raise _Unfit(error) from None


async def all_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they give, in order; the first failure ends the others, and is raised."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
