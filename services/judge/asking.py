"""One question to the upstream LLM: asked once more where the answer is not what was asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from scorekit.errors import SampleError, UserError
from scorekit.llm import LLMClient, LLMError, Message, Sampling, parse_json
from scorekit.schemas import TaskInfo

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


class _Unfit(Exception):
    """The LLM answered, but gave no verdict. usage: what that took."""

    def __init__(self, error: LLMError, max_tokens: int, usage: Counter[str]) -> None:
        super().__init__(error)
        self.usage = usage
        self.is_cut = error.type == "length"
        if self.is_cut:
            message = f"the judge's JSON was cut at {max_tokens} tokens: raise options.max_tokens"
        else:
            message = f"the judge's answer, asked for twice, is no verdict: {error.message[:200]}"
        self.error = SampleError("model_failure", message)


async def ask(
    client: LLMClient, question: JudgeQuestion, sampling: Sampling, request_id: str
) -> tuple[Any, Counter[str]]:
    """What was read from the LLM's answer, and the tokens that it took. Raises SampleError."""
    task, texts, pictures = question.task, question.texts, question.pictures
    try:
        try:
            messages = task.messages(texts, pictures)
            return await _once(client, question, sampling, messages, request_id)
        except _Unfit as unfit:
            if unfit.is_cut:
                raise
            messages = task.messages(texts, pictures, _AGAIN)
            second = await _once(client, question, sampling, messages, f"{request_id}-again")
            return second[0], second[1] + unfit.usage
    except _Unfit as unfit:
        raise unfit.error from None
    except LLMError as error:
        if error.type == "overlong":
            raise SampleError("overlong", f"{error}") from None
        raise SampleError("upstream", f"{error}", retryable=error.retryable) from None
    except UserError as error:  # a key or a model's name that the upstream refuses
        raise SampleError("upstream", f"{error}", retryable=False) from None


async def _once(
    client: LLMClient,
    question: JudgeQuestion,
    sampling: Sampling,
    messages: list[Message],
    request_id: str,
) -> tuple[Any, Counter[str]]:
    schema = question.task.schema_
    (choice,) = await client.chat(messages, sampling, request_id=request_id, json_schema=schema)
    usage = Counter(
        prompt_tokens=choice.prompt_tokens or 0, completion_tokens=choice.completion_tokens or 0
    )
    try:
        if len(choice.text) > (most := _CHARS_A_TOKEN * sampling.max_tokens):
            said = f"{len(choice.text)} characters, {most} at most for {sampling.max_tokens} tokens"
            raise LLMError("malformed", said)
        return question.task.read(parse_json(choice, schema), question.texts), usage
    except LLMError as error:
        raise _Unfit(error, sampling.max_tokens, usage) from None


async def all_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they give, in order; the first failure ends the others, and is raised."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
