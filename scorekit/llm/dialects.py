"""Dialects of OpenAI's API: which fields each kind of server accepts and refuses.

- `vllm`: chat completions with every sampling field (`wire.Sampling`).
- `openai`: chat completions with OpenAI's own fields only. It refuses vLLM's fields, and its
  reasoning models refuse sampling fields, so values at the API's default are left out.
- `gemini`: as `openai`, without a seed, which Gemini's endpoint for OpenAI's clients refuses.
- `responses`: the Responses API. One text per request, no seed, no stop; the server stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import to_json

from scorekit.errors import UserError
from scorekit.llm.errors import LLMError
from scorekit.llm.wire import (
    ChatPrompt,
    Choice,
    Counted,
    Message,
    Sampling,
    TokenCount,
    Usage,
    json_format,
    read_answer,
)

DialectName = Literal["vllm", "openai", "gemini", "responses"]
ParsedAnswer = tuple[dict[int, Choice], Usage]


class Dialect(NamedTuple):
    """An API.

    path: of a request.
    body: builds it from a prompt, a model and a part (`ChatPrompt`).

    read: parses choices and token counts of an answer.
    several: whether a request may ask for several choices.
    grows: whether larger requests get a longer timeout (`limits.read_timeout_s`), which assumes the
    speed of one vLLM server."""

    path: str
    body: Callable[[ChatPrompt, str, range], bytes]
    read: Callable[[bytes, range], ParsedAnswer]
    several: bool
    grows: bool = False


def _openai_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling fields that OpenAI accepts and that are not at their default.

    Raises UserError for the others."""
    if (sampling.top_k, sampling.min_p, sampling.repetition_penalty) != (0, 0.0, 1.0):
        raise UserError("top_k, min_p and repetition_penalty: only vLLM supports them")
    if sampling.chat_template_kwargs:
        raise UserError("chat_template_kwargs: only vLLM supports them. Use the API vllm")
    values = {"temperature": (sampling.temperature, 1.0), "top_p": (sampling.top_p, 1.0)}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def _chat_body(prompt: ChatPrompt, model: str, part: range) -> bytes:
    s = prompt.sampling
    fields: dict[str, Any] = {
        "model": model,
        "messages": prompt.messages,
        "max_completion_tokens": s.max_tokens,
        **_openai_sampling(s),
    }
    if len(part) > 1:
        fields["n"] = len(part)
    optional = {
        "seed": None if s.seed is None else s.seed + part[0],
        "presence_penalty": s.presence_penalty or None,
        "frequency_penalty": s.frequency_penalty or None,
        "stop": list(s.stop) or None,
        "reasoning_effort": s.effort,
        "response_format": None if prompt.json_schema is None else json_format(prompt.json_schema),
    }
    return to_json(fields | {name: value for name, value in optional.items() if value is not None})


def _gemini_body(prompt: ChatPrompt, model: str, part: range) -> bytes:
    unseeded = replace(prompt, sampling=replace(prompt.sampling, seed=None))
    return _chat_body(unseeded, model, part)


def _responses_body(prompt: ChatPrompt, model: str, part: range) -> bytes:
    s = prompt.sampling
    if s.stop or s.presence_penalty or s.frequency_penalty:
        raise UserError("stop and penalties: the Responses API does not support them")
    fields: dict[str, Any] = {
        "model": model,
        "input": [_input_item(message) for message in prompt.messages],
        "max_output_tokens": s.max_tokens,
        "store": False,
        **_openai_sampling(s),
    }
    if s.effort is not None:
        fields["reasoning"] = {"effort": s.effort}
    if prompt.json_schema is not None:
        json_schema = json_format(prompt.json_schema)["json_schema"]
        fields["text"] = {"format": {"type": "json_schema", **json_schema}}
    return to_json(fields)


def _input_item(message: Message) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    content_type = "output_text" if message["role"] == "assistant" else "input_text"
    return {"role": message["role"], "content": [_input_part(part, content_type) for part in parts]}


def _input_part(part: Any, content_type: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": content_type, "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}


class _Part(BaseModel):
    type: str
    text: str = ""


class _Item(BaseModel):
    type: str
    content: list[_Part] | None = None


class _Incomplete(BaseModel):
    reason: str | None = None


class _ResponsesUsage(Usage):
    prompt_tokens: TokenCount = Field(0, alias="input_tokens")
    completion_tokens: TokenCount = Field(0, alias="output_tokens")


class _Response(BaseModel):
    status: str = "completed"
    output: list[_Item]
    usage: Counted[_ResponsesUsage] = None
    incomplete_details: _Incomplete | None = None


#: Why a response is incomplete -> the finish reason of the chat API.
_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def _read_response(body: bytes, part: range) -> ParsedAnswer:
    """Return the text of a response; empty if it has none (all tokens were used for thinking).

    Raises LLMError (retryable) for an invalid response, or one that the server broke off.
    """
    try:
        answer = _Response.model_validate_json(body)
    except ValidationError:
        excerpt = body[:200].decode(errors="replace")
        raise LLMError("malformed", f"not a response: {excerpt}", retryable=True) from None
    if answer.status not in ("completed", "incomplete"):
        raise LLMError("server_error", f"a response that is {answer.status[:40]}", retryable=True)
    item_types = {item.type for item in answer.output}
    contents = [item.content or [] for item in answer.output if item.type == "message"]
    text = "".join(
        content_part.text
        for content in contents
        for content_part in content
        if content_part.type == "output_text"
    )
    incomplete_reason = answer.incomplete_details.reason if answer.incomplete_details else None
    reason = (
        "stop"
        if answer.status == "completed"
        else _REASONS.get(str(incomplete_reason), "incomplete")
    )
    no_text = None
    if any(content_part.type == "refusal" for content in contents for content_part in content):
        reason, no_text = "content_filter", "refusal"
    elif "function_call" in item_types:
        no_text = "tool_call"
    elif "reasoning" in item_types:
        no_text = "only_thinking"
    usage = answer.usage
    choice = Choice(
        part[0],
        text,
        reason,
        usage.completion_tokens if usage else None,
        usage.prompt_tokens if usage else None,
        no_text=None if text.strip() else no_text,
    )
    return {part[0]: choice}, usage or Usage()


#: vLLM gives every choice that has ended a finish reason.
_read_vllm = partial(read_answer, needs_reason=True)

DIALECTS: dict[DialectName, Dialect] = {
    "vllm": Dialect("/chat/completions", ChatPrompt.body, _read_vllm, several=True, grows=True),
    "openai": Dialect("/chat/completions", _chat_body, read_answer, several=True),
    "gemini": Dialect("/chat/completions", _gemini_body, read_answer, several=True),
    "responses": Dialect("/responses", _responses_body, _read_response, several=False),
}
