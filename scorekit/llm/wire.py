"""Requests and answers of an OpenAI-compatible chat server."""

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

from scorekit.llm.errors import CAUSES, LLMError

#: End of a model's thinking: `</think>`, `</seed:think>`.
_THOUGHT_END = re.compile(r"</(?:\w{1,16}:)?think(?:ing)?>", re.I)
_THOUGHT_START = re.compile(r"\s*<(?:\w{1,16}:)?think(?:ing)?>(?!.*</)", re.I | re.S)
#: Finish reasons of a choice that is a call of a tool.
_CALLS = frozenset({"tool_calls", "function_call", "tool_use"})
#: Finish reasons of a choice that the server broke off.
_BROKEN_OFF = frozenset({"abort", "error"})
#: Bytes of an answer of another form that its error repeats.
_MAX_EXCERPT = 200
#: Other words of servers for the finish reasons of the chat API: TGI, Anthropic, Cohere, Gemini.
_SYNONYMS = {
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "complete": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "safety": "content_filter",
    "recitation": "content_filter",
    "prohibited_content": "content_filter",
    "blocklist": "content_filter",
    "spii": "content_filter",
}


#: A turn of a chat: its role, and its content, which is a text or a list of parts (`text_part`,
#: `image_part`).
Message = Mapping[str, Any]


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a message for a text."""
    return {"type": "text", "text": text}


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """Return the part of a message for an image, as a data URL within the request."""
    url = f"data:{media_type};base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    Every field but the last two is always sent to vLLM: it would fill in a missing field from the
    model's generation_config.json, which often has a top_k of 20. Other servers: `llm.dialects`.

    effort: how much a reasoning model may think (minimal, low, ...); None: not sent.
    chat_template_kwargs: variables of the model's chat template, such as {"enable_thinking":
    False}; None: not sent.
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
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled text. Candidate `index` has the seed `seed + index` with every strategy.

    finish_reason: "stop", "length" (cut by max_tokens), "content_filter", or another word of the
    server, with which a text is not whole (`unfinished_reason`); "unknown" if it gave none, as some
    gateways never do.
    text: empty if the server gave none.
    completion_tokens, prompt_tokens: None if several choices came in one answer, which counts them
    together, or if the server counts none.
    reasoning: what the server's reasoning parser removed from the text; None: nothing.
    no_text: what came instead of a text, as far as the server says: "refusal", "tool_call",
    "only_thinking".
    """

    index: int
    text: str
    finish_reason: str
    completion_tokens: int | None
    prompt_tokens: int | None = None
    reasoning: str | None = None
    no_text: str | None = None

    def cause_of_no_text(self) -> str | None:
        """Return why the choice has no text, a key of `errors.CAUSES`; None if it has one.

        Thinking in the text is none. Asked again, such a choice comes again, and is paid again."""
        is_unended_thought = self.finish_reason == "length" and _THOUGHT_START.match(self.text)
        if without_thinking(self.text).strip() and not is_unended_thought:
            return None
        if self.no_text in ("refusal", "tool_call"):
            return self.no_text
        is_thinking = self.no_text == "only_thinking" or bool(self.text.strip())
        problem = unfinished_reason(self.finish_reason)
        if problem == "refused":
            return "filtered_answer"
        if self.finish_reason in _CALLS:
            return "tool_call"
        if problem == "length":
            return "thinking_cut" if is_thinking else "cut_empty"
        return "only_thinking" if is_thinking else "no_text"


def common_reason(reason: str | None) -> str:
    """Return a finish reason in the chat API's words: stop, length, content_filter.

    Another word stays as it is; without one, the reason is unknown.
    """
    word = (reason or "unknown").strip().lower()
    word = word.partition(":")[0].strip()  # Gemini adds what was filtered: "content_filter: X"
    return _SYNONYMS.get(word, word) or "unknown"


def unfinished_reason(reason: str | None) -> str | None:
    """Return why a text with this finish reason is not a model's whole answer; None if it may be.

    `length`: max_tokens cut it; `refused`: a content filter withheld it; `malformed`: it is a call
    of a tool, or ended in a way that was not requested.
    """
    word = common_reason(reason)
    if word in ("stop", "unknown"):
        return None
    return {"length": "length", "content_filter": "refused"}.get(word, "malformed")


class _Part(BaseModel):
    """A part of a content that is a list: Mistral's models that think, and some proxies."""

    type: str = ""
    text: str | None = None


class _Message(BaseModel):
    content: str | list[_Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # older name, still used by llama.cpp and others
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    def text(self) -> str:
        """Return the text, which may be empty."""
        if isinstance(self.content, list):
            texts = [part.text for part in self.content if part.type in ("text", "output_text")]
            return "".join(text or "" for text in texts)
        return self.content or ""

    def cause_of_no_text(self) -> str | None:
        """Return why the message has no text, as far as it says: a key of `CAUSES`."""
        parts = self.content if isinstance(self.content, list) else []
        if self.refusal or any(part.type == "refusal" for part in parts):
            return "refusal"
        if self.tool_calls or self.function_call:
            return "tool_call"
        is_thinking = any(part.type in ("thinking", "reasoning") for part in parts)
        return "only_thinking" if self.reasoning or self.reasoning_content or is_thinking else None


class _AnswerChoice(BaseModel):
    index: int = 0
    message: _Message
    finish_reason: str | None = None


#: Tokens of one answer; a larger number is a mistake of the server.
TokenCount = Annotated[int, Field(ge=0, le=2**40)]


class Usage(BaseModel):
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0


def _or_none(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        return None


T = TypeVar("T")
#: An invalid count becomes None: the answer itself is good, and was paid for.
Counted = Annotated[T | None, WrapValidator(_or_none)]


class _Answer(BaseModel):
    choices: list[_AnswerChoice]
    usage: Counted[Usage] = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A logical request: the parts that all its HTTP requests share."""

    messages: Sequence[Message]
    sampling: Sampling
    n: int
    request_id: str
    json_schema: Mapping[str, Any] | None

    def part_id(self, part: range) -> str:
        """Return the id of a part, the same for every attempt."""
        if len(part) == self.n:
            return self.request_id
        last = f"-{part[-1]}" if len(part) > 1 else ""
        return f"{self.request_id}.{part[0]}{last}"

    def body(self, model: str, part: range) -> bytes:
        """Return the body of a request for a part of the candidates.

        Raises ValueError if a text is not Unicode."""
        sampling = self.sampling
        fields: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "n": len(part),
            "seed": None if sampling.seed is None else sampling.seed + part[0],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop": list(sampling.stop) or None,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        }
        if sampling.effort is not None:
            fields["reasoning_effort"] = sampling.effort
        if sampling.chat_template_kwargs:
            fields["chat_template_kwargs"] = sampling.chat_template_kwargs
        if self.json_schema is not None:
            fields["response_format"] = json_format(self.json_schema)
        return to_json(fields)


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `response_format` that requests JSON of a schema."""
    answer = {"name": "answer", "schema": typed(schema), "strict": True}
    return {"type": "json_schema", "json_schema": answer}


def typed(schema: Any) -> Any:
    """Return a schema in which every `enum` of texts has `type: string`, at any depth.

    JSON Schema does not need it, but Gemini refuses an enum without it. So schemas get it as they
    are sent. It changes which answers are valid in no case.
    """
    if isinstance(schema, list):
        return [typed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    typed_fields = {name: typed(part) for name, part in schema.items()}
    values = schema.get("enum")
    is_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return {"type": "string", **typed_fields} if is_texts else typed_fields


def read_answer(
    body: bytes, part: range, *, needs_reason: bool = False
) -> tuple[dict[int, Choice], Usage]:
    """Return choices by index of the candidate, and token counts. Missing choices are not an error.

    needs_reason: whether the server names the finish reason of every choice that has ended.
    Raises LLMError (retryable) if it is not a chat completion, has no choice where one was
    requested, or was broken off by the server.
    """
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError:
        excerpt = body[:_MAX_EXCERPT].decode(errors="replace")
        raise LLMError("malformed", f"not a chat completion: {excerpt}", retryable=True) from None
    choices = answer.choices[: len(part)]
    if not choices and len(part) == 1:
        raise LLMError("malformed", "an answer without a choice", retryable=True)
    reasons = [common_reason(choice.finish_reason) for choice in choices]
    if not _BROKEN_OFF.isdisjoint(reasons) or (needs_reason and "unknown" in reasons):
        raise LLMError("server_error", "the server broke a choice off", retryable=True)
    offsets = [choice.index for choice in choices]
    if len(set(offsets)) < len(offsets) or not set(offsets) <= set(range(len(part))):
        offsets = list(range(len(choices)))  # a server that does not number its choices
    usage = answer.usage if len(part) == 1 else None
    tokens = usage.completion_tokens if usage else None
    prompt_tokens = usage.prompt_tokens if usage else None
    choice_by_index = {}
    for offset, choice, reason in zip(offsets, choices, reasons, strict=True):
        message = choice.message
        text, reasoning = message.text(), message.reasoning or message.reasoning_content
        no_text = None if text.strip() else message.cause_of_no_text()
        if no_text == "refusal":
            reason = "content_filter"  # as the Responses API's
        choice_by_index[part[offset]] = Choice(
            part[offset], text, reason, tokens, prompt_tokens, reasoning, no_text
        )
    return choice_by_index, answer.usage or Usage()


def parse_json(choice: Choice, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object in a choice's text, checked against its JSON schema.

    It may follow the model's thinking (`<think>...</think>`) and be in a code fence; any other text
    beside it is an error.

    Raises LLMError: `length` if max_tokens cut the text, `refused` if a content filter or the model
    itself withheld it, `malformed` if there is no text, or one that is not JSON, not an object, has
    a duplicate key, or does not match the schema. Retryable if it is worth to be asked for again:
    an answer without a text (see `cause`) is not.
    """
    from jsonschema import Draft202012Validator

    problem, cause = unfinished_reason(choice.finish_reason), choice.cause_of_no_text()
    if cause is not None:
        kind = "malformed" if problem is None else problem
        raise LLMError("refused" if cause == "refusal" else kind, CAUSES[cause], cause=cause)
    if problem == "length":
        raise LLMError("length", "the answer was cut by max_tokens")
    if problem == "refused":
        cause = "filtered_answer"
        raise LLMError("refused", CAUSES[cause], cause=cause)
    if problem is not None:
        message = f"an answer that ended with finish_reason {choice.finish_reason[:40]!r}"
        raise LLMError(problem, message, retryable=True)
    try:
        value = _parse_json_in(choice.text)
    except ValueError as parse_error:
        raise LLMError("malformed", f"not JSON: {parse_error}", retryable=True) from None
    if not isinstance(value, dict):
        raise LLMError("malformed", "JSON, but not an object", retryable=True)
    for error in Draft202012Validator(schema).iter_errors(value):
        raise LLMError("malformed", f"{error.json_path}: {error.message[:200]}", retryable=True)
    return value


def without_thinking(text: str) -> str:
    """Return the text after a model's thinking, if no parser has removed the thinking."""
    thought = _THOUGHT_END.search(text)  # some templates put the opening mark into the prompt
    return text[thought.end() :] if thought else text


def _parse_json_in(text: str) -> Any:
    """Return the JSON of a text, without what models put around it. Raises ValueError."""
    answer = without_thinking(text)
    for candidate in (text, _without_fence(text), answer):
        with contextlib.suppress(ValueError):
            return _parse_strict(candidate)
    return _parse_strict(_without_fence(answer))


def _parse_strict(text: str) -> Any:
    """Parse JSON. A duplicate key is a ValueError, too: one of its values would be lost."""
    value = from_json(text, allow_inf_nan=False)
    json.loads(text, object_pairs_hook=_check_unique_keys)
    return value


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has a duplicate key")


def _without_fence(text: str) -> str:
    bare = text.strip()
    if len(bare) > 6 and bare.startswith("```") and bare.endswith("```"):
        return bare[3:-3].strip().removeprefix("json").removeprefix("JSON")
    return text
