"""Read the errors in the bodies of LLM servers: their codes, their words, and what they mean.

Each server has its own form: OpenAI, Azure, vLLM, SGLang, llama.cpp, TGI, Ollama, Anthropic,
Gemini, Bedrock, and proxies (LiteLLM, OpenRouter) that pass on the error of another one as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from scorekit.net.masking import MAX_SEARCHED

#: Codes of an error whose prompt, with max_tokens, is longer than the model's context.
_OVERLONG_CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, Azure, llama-cpp-python, Cerebras
        "context_window_exceeded",
        "model_context_window_exceeded",
        "exceed_context_size_error",  # llama.cpp
        "contextwindowexceedederror",  # LiteLLM
        "prompt_too_long",
    }
)
#: Words for the same, of servers without a code for it.
_OVERLONG = re.compile(
    r"context_length_exceeded|contextwindowexceedederror"
    r"|maximum context length"  # OpenAI, vLLM, SGLang, DeepSeek, Mistral, OpenRouter
    r"|longer than the maximum model length"  # vLLM
    r"|exceed(?:s|ed)? (?:the |its |your |max |this model's )?context (?:window|length|limit)"
    r"|exceed(?:s|ed)? (?:the )?(?:available context size|model token limit)"  # llama.cpp, Kimi
    r"|exceed(?:s|ed)? max context length"  # Ollama
    r"|context (?:window|length|size) (?:was )?exceed"  # LiteLLM, MiniMax
    r"|(?:longer|greater) than the (?:model's )?context length"  # SGLang, LM Studio
    r"|context length of only \d"
    r"|prompt is too long|prompt too long|input is too long for requested model"
    r"|input token count[^.]{0,40} exceeds the maximum number of"  # Gemini
    r"|input tokens exceed the configured limit"  # Azure
    r"|maximum prompt length is \d"  # xAI
    r"|prompt token count of \d{1,12} exceeds"  # GitHub Copilot
    r"|input length[^.]{0,40} exceeds the maximum allowed"  # SGLang, Together
    r"|reduce the length of the messages"  # Groq, Cerebras
    r"|`inputs` tokens \+ `max_new_tokens` must be|`inputs` must have less than \d"  # TGI
    r"|number of tokens in the (?:prompt|input) cannot exceed"  # Cohere
    r"|range of input length should be"  # DashScope
    r"|sum of prompt length"  # TensorRT-LLM
)
#: Codes of limits of a rate. Their words are often about tokens, too.
_RATE_CODES = frozenset(
    {"rate_limit_exceeded", "rate_limit_error", "tokens", "throttlingexception"}
)
_RATE = re.compile(r"rate limit|tokens? per (?:min|day|hour|second)|throttl|please wait before")
#: Statuses of a refusal for what a request contains. (429 is never about the length of a text.)
_CONTENT_STATUS = frozenset({400, 413, 422, 500})
#: Codes of a filter that refused the prompt.
_FILTER_CODES = frozenset(
    {
        "content_filter",  # OpenAI, Azure
        "responsibleaipolicyviolation",
        "content_policy_violation",
        "contentpolicyviolationerror",  # LiteLLM
        "moderation_blocked",
        "data_inspection_failed",  # DashScope
        "datainspectionfailed",
    }
)
_FILTER = re.compile(r"contentpolicyviolationerror|content management policy|content_filter\b")


def error_in(body: bytes) -> Any:
    """Return a body's error: an object if there is one, else a text. Gemini wraps it in a list."""
    try:
        content: Any = from_json(body)
    except ValueError:
        return body[:MAX_SEARCHED].decode(errors="replace")
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        return content
    error = content.get("error")
    if isinstance(error, str) and error:  # TGI and Ollama: the type stands beside the text
        return {"message": error, "type": content.get("error_type")}
    return error or content


def stated_status(body: bytes) -> int | None:
    """Return the status for which the error in a body of HTTP 200 stands; None without an error.

    llama.cpp and proxies that have begun to answer cannot change the status any more."""
    try:
        content = from_json(body)
    except ValueError:
        return None
    error = content.get("error") if isinstance(content, dict) else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def codes_of(error: Any) -> Iterator[str]:
    """Yield an error's codes: `code` and `type` (OpenAI), `reason` and each `quotaId` (Google)."""
    if not isinstance(error, dict):
        return
    details = error.get("details")
    objects = [error, error.get("innererror"), *(details if isinstance(details, list) else ())]
    for entry in [entry for entry in objects if isinstance(entry, dict)]:
        violations = entry.get("violations")
        quotas = violations if isinstance(violations, list) else ()
        names = ("code", "type", "__type", "reason")
        yield from (str(entry[name]) for name in names if entry.get(name) is not None)
        yield from (str(quota.get("quotaId")) for quota in quotas if isinstance(quota, dict))


def message_of(error: Any) -> str:
    """Return the server's message, at any length.

    Not the fields beside it: FastAPI's have the request, so a text of the prompt."""
    message = error
    if isinstance(message, dict):
        message = message.get("message") or message.get("error") or message.get("detail") or message
    if isinstance(message, list):  # FastAPI: a mistake for each field
        message = "; ".join(
            str(entry.get("msg", "")) if isinstance(entry, dict) else str(entry)
            for entry in message
        )
    return str(message)[:MAX_SEARCHED]


def is_overlong(status: int, codes: frozenset[str], message: str) -> bool:
    """Return True if the prompt, with max_tokens, is longer than the model's context.

    By its codes if they say so; by its words unless a code or the words speak of a rate. codes,
    message: in small letters."""
    if codes & _OVERLONG_CODES:
        return True
    if status not in _CONTENT_STATUS or codes & (_RATE_CODES | _FILTER_CODES):
        return False
    return _OVERLONG.search(message) is not None and not _RATE.search(message)


def is_filtered(status: int, codes: frozenset[str], message: str) -> bool:
    """Return True if a content filter refused the prompt. codes, message: in small letters."""
    if codes & _FILTER_CODES:
        return True
    return status in _CONTENT_STATUS and _FILTER.search(message) is not None
