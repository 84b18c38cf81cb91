"""What goes over the wire to an OpenAI-compatible chat server, and what comes back."""

from __future__ import annotations

import contextlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import from_json, to_json

from scorekit.llm.errors import LLMError

#: What ends a model's thinking: `</think>`, `</seed:think>`.
_THOUGHT_END = re.compile(r"</(?:\w{1,16}:)?think(?:ing)?>", re.I)
#: Finish reasons of a choice that the server itself gave up.
_BROKEN_OFF = frozenset({"abort", "error"})


#: A turn of a chat: its role, and its content, which is a text or a list of parts (`text_part`,
#: `image_part`).
Message = Mapping[str, Any]


def text_part(text: str) -> dict[str, Any]:
    """A text among the parts of a message."""
    return {"type": "text", "text": text}


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """A picture among the parts of a message, in the request itself: as a data URL."""
    url = f"data:{media_type};base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Every field but the last is sent to vLLM, always: a field left out would be
    filled in from the model's generation_config.json, which commonly holds a top_k of 20. What goes
    to other servers: `llm.dialects`.

    effort: how much a reasoning model may think (minimal, low, ...); None: not said.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One text. Candidate `index` has the seed `seed + index`, whichever strategy fetched it.

    finish_reason: "stop", "length" (cut by max_tokens), or another word of the server; "unknown"
    where it gave none. text: empty where the server gave none. completion_tokens, prompt_tokens:
    None where several choices came in one answer, which counts them together, and where the server
    counts none. reasoning: what the server's reasoning parser took out of the text; None: nothing.
    """

    index: int
    text: str
    finish_reason: str
    completion_tokens: int | None
    prompt_tokens: int | None = None
    reasoning: str | None = None


class _Message(BaseModel):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name, which llama.cpp and others keep


class _AnswerChoice(BaseModel):
    index: int = 0
    message: _Message
    finish_reason: str | None = None


#: Of one answer; a server that says another number does not know how to count.
TokenCount = Annotated[int, Field(ge=0, le=2**40)]


class Usage(BaseModel):
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0


def _or_none(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(given)
    except ValidationError:
        return None


T = TypeVar("T")
#: What a server counts wrongly is not counted: its answer is good, and was paid for.
Counted = Annotated[T | None, WrapValidator(_or_none)]


class _Answer(BaseModel):
    choices: list[_AnswerChoice]
    usage: Counted[Usage] = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A logical request: what all its parts share."""

    messages: Sequence[Message]
    sampling: Sampling
    n: int
    request_id: str
    json_schema: Mapping[str, Any] | None

    def part_id(self, part: range) -> str:
        """The same for every attempt, another one for every part."""
        if len(part) == self.n:
            return self.request_id
        last = f"-{part[-1]}" if len(part) > 1 else ""
        return f"{self.request_id}.{part[0]}{last}"

    def body(self, model: str, part: range) -> bytes:
        """The body of a request for some of the candidates. Raises ValueError for what is not
        Unicode text."""
        s = self.sampling
        fields: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "n": len(part),
            "seed": None if s.seed is None else s.seed + part[0],
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "stop": list(s.stop) or None,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": s.repetition_penalty,
        }
        if s.effort is not None:
            fields["reasoning_effort"] = s.effort
        if self.json_schema is not None:
            fields["response_format"] = json_format(self.json_schema)
        return to_json(fields)


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What asks a chat for JSON of a schema."""
    answer = {"name": "answer", "schema": typed(schema), "strict": True}
    return {"type": "json_schema", "json_schema": answer}


def typed(schema: Any) -> Any:
    """Return a schema in which every `enum` of texts says `type: string`, at any depth.

    JSON Schema does not ask for it; Gemini refuses an enum without it. So ours and those of the
    operator's rubrics get it as they are sent. No answer fits or fails by it.
    """
    if isinstance(schema, list):
        return [typed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: typed(part) for name, part in schema.items()}
    values = schema.get("enum")
    is_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return {"type": "string", **found} if is_texts else found


def read_answer(body: bytes, part: range) -> tuple[dict[int, Choice], Usage]:
    """Choices by index of the candidate, and tokens. Fewer than asked for are left to the caller.

    Raises LLMError (retryable) for what is no chat completion, holds no choice where one was
    asked for, or was broken off by the server.
    """
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError:
        shown = body[:80].decode(errors="replace")
        raise LLMError("malformed", f"no chat completion: {shown!r}", retryable=True) from None
    choices = answer.choices[: len(part)]
    if not choices and len(part) == 1:
        raise LLMError("malformed", "an answer without a choice", retryable=True)
    if any(choice.finish_reason in _BROKEN_OFF for choice in choices):
        raise LLMError("server_error", "the server broke a choice off", retryable=True)
    offsets = [choice.index for choice in choices]
    if len(set(offsets)) < len(offsets) or not set(offsets) <= set(range(len(part))):
        offsets = list(range(len(choices)))  # a server that does not number its choices
    alone = answer.usage if len(part) == 1 else None
    tokens = alone.completion_tokens if alone else None
    prompt_tokens = alone.prompt_tokens if alone else None
    found = {}
    for offset, choice in zip(offsets, choices, strict=True):
        text, reason = choice.message.content or "", choice.finish_reason or "unknown"
        thought = choice.message.reasoning or choice.message.reasoning_content
        found[part[offset]] = Choice(part[offset], text, reason, tokens, prompt_tokens, thought)
    return found, answer.usage or Usage()


def parse_json(choice: Choice, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The object in a choice's text, checked against its JSON schema. It may stand behind the
    model's thinking (`<think>...</think>`) and in a code fence; nothing else may stand beside it.

    Raises LLMError: `length` where max_tokens cut the text, `refused` where a content filter kept
    it back, `malformed` where it is not JSON, no object, has a key twice, or is not as the schema
    says.
    """
    from jsonschema import Draft202012Validator

    if choice.finish_reason == "length":
        raise LLMError("length", "the answer was cut by max_tokens")
    if choice.finish_reason == "content_filter":
        raise LLMError("refused", "the server's content filter kept the answer back")
    try:
        value = _json_in(choice.text)
    except ValueError as error:
        raise LLMError("malformed", f"not JSON: {error}", retryable=True) from None
    if not isinstance(value, dict):
        raise LLMError("malformed", "JSON, but no object", retryable=True)
    for fault in Draft202012Validator(schema).iter_errors(value):
        raise LLMError("malformed", f"{fault.json_path}: {fault.message[:200]}", retryable=True)
    return value


def without_thinking(text: str) -> str:
    """What a model says behind its thinking, where that stands in the text (no parser took it)."""
    thought = _THOUGHT_END.search(text)  # some templates put the opening mark into the prompt
    return text[thought.end() :] if thought else text


def _json_in(text: str) -> Any:
    """The JSON of a text, without what models put around it. Raises ValueError."""
    answer = without_thinking(text)
    for bare in (text, _unfenced(text), answer):
        with contextlib.suppress(ValueError):
            return _loaded(bare)
    return _loaded(_unfenced(answer))


def _loaded(text: str) -> Any:
    """Raises ValueError, too, where an object has a key twice: one of the values would be lost."""
    value = from_json(text, allow_inf_nan=False)
    json.loads(text, object_pairs_hook=_each_once)
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice in an object")


def _unfenced(text: str) -> str:
    bare = text.strip()
    if len(bare) > 6 and bare.startswith("```") and bare.endswith("```"):
        return bare[3:-3].strip().removeprefix("json").removeprefix("JSON")
    return text
