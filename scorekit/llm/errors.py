"""Errors of requests to an OpenAI-compatible server, and what a service's caller may see of them.

A mistake of the operator is a `UserError` that says what to do. Every other failure is an
`LLMError` of one request. What an error means is read from its status, its codes and its words:
each server has its own form of them (OpenAI, Azure, vLLM, SGLang, llama.cpp, TGI, Ollama,
Anthropic, Gemini, Bedrock, and proxies such as LiteLLM and OpenRouter that pass on the error of
another one as text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from scorekit.errors import SampleError, ScorekitError, UserError
from scorekit.net.masking import MAX_SEARCHED, server_words
from scorekit.net.retry import retry_after_s

#: Characters of an error's message, and of the server's words in it.
_MAX_MESSAGE = 600
MAX_WORDS = 300
#: `LLMError.type` -> its meaning, for a caller who does not know which server a service uses.
LLM_ERROR_TYPES = {
    # a refused or broken connection, or HTTP 502, 503, 504
    "unreachable": "the upstream server cannot be reached",
    "timeout": "the upstream server did not answer in time",
    # HTTP 429
    "overloaded": "the upstream server has too many requests",
    # HTTP 408, 409, 424 or another 5xx, or an answer that the server itself broke off
    "server_error": "the upstream server failed",
    # no chat completion, or a text that is not the JSON asked for
    "malformed": "the upstream server's answer is not a valid one",
    # where JSON was asked for
    "length": "the upstream server's answer was cut by max_tokens",
    "overlong": "prompt and max_tokens do not fit the upstream model's context",
    # strategy n_parameter
    "incomplete": "the upstream server gave fewer answers than asked for",
    # another 4xx, a prompt that is not Unicode text, or JSON that a content filter kept back
    "refused": "the upstream server refused the request",
}
#: `LLMError.cause` -> what happened, in words that no server has chosen.
CAUSES = {
    "left": "nobody waits for the answer any more",
    "no_turn": "it was not sent before the deadline",
    "filtered_prompt": "a content filter refused the prompt",
    "filtered_answer": "a content filter withheld the answer",
    "refusal": "the model refused to answer",
    "tool_call": "the model called a tool instead of answering",
    "only_thinking": "the answer has thinking and no text: switch thinking off",
    "thinking_cut": "thinking used up max_tokens, and no text came: increase max_tokens, or switch "
    "thinking off",
    "cut_empty": "max_tokens was used up, and no text came",
    "no_text": "the answer has no text",
}
_AWAY = frozenset({502, 503, 504})
#: 424 is a failure of the model behind the server: TEI, TGI, Bedrock.
_RETRY_4XX = frozenset({408, 409, 424})
_NO_TEMPLATE = ("default chat template is no longer allowed", "chat_template is not set")
_TEMPLATE_REFUSES = ("system role not supported", "roles must alternate")
_TOO_MANY_TOKENS = "cannot be greater than max_model_len"
#: Error codes of providers (`codes_of`) -> what the operator has to fix. They hold for any status:
#: OpenAI sends an empty account as 429, as it sends too many requests.
_MISTAKES = {
    "insufficient_quota": "quota",
    "billing_hard_limit_reached": "quota",
    "billing_not_active": "quota",
    "invalid_api_key": "key",
    "account_deactivated": "key",
    "API_KEY_INVALID": "key",
    "model_not_found": "model",
}
#: Part of the name of a Gemini quota that resets the next day; others reset each minute.
_DAILY = "PerDay"
#: Mistakes that the operator has to fix. These messages contain no secrets.
MISTAKES = {
    "redirect": "it redirects",
    "key": "it refuses the API key",
    "quota": "its account has no money or no quota left",
    "model": "it does not serve the model",
    "address": "it is not an OpenAI-compatible API",
    "template": "its chat template does not fit",
    "tokens": "max_tokens is more than its model reads",
    "setup": "it refuses requests because of its setup",
}


class OperatorMistake(UserError):
    """An error of every request until the operator fixes its cause.

    kind: a key of `MISTAKES`.
    """

    def __init__(self, message: str, lines: Sequence[str] = (), kind: str = "setup") -> None:
        super().__init__(message, lines)
        self.kind = kind


class LLMError(ScorekitError):
    """One request failed for good, after its attempts. `type` is a key of `LLM_ERROR_TYPES`.

    retryable: whether the same request may succeed later.
    request_id: the X-Request-Id that failed (that of a part if the request was split).
    retry_after: seconds that the server asked for.
    status: the HTTP status, if there was an answer.
    cause: a key of `CAUSES`, if one is known.
    late_pause_s: seconds of the pause that would have ended after the deadline, if the call ended
    for that. The message is one line that may be logged (`server_words`).
    """

    def __init__(
        self,
        type: str,
        message: str,
        *,
        retryable: bool = False,
        request_id: str = "",
        retry_after: float | None = None,
        status: int | None = None,
        cause: str | None = None,
    ) -> None:
        if type not in LLM_ERROR_TYPES:
            raise ValueError(f"unknown LLM error type {type!r}")
        if cause is not None and cause not in CAUSES:
            raise ValueError(f"unknown cause {cause!r}")
        message = server_words(message, max_chars=_MAX_MESSAGE)
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.cause = cause
        self.late_pause_s: float | None = None
        self.retryable = retryable
        self.request_id = request_id
        self.retry_after = retry_after
        self.status = status

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    def note_late_pause(self, seconds: float) -> None:
        """Note that the call ended because a retry would have come after its deadline."""
        self.late_pause_s = seconds
        self.message += f"; {late_retry(seconds)}"

    @property
    def server_is_away(self) -> bool:
        """Return True if the server may be restarting and is worth waiting for
        (`wait_for_server_s`)."""
        return self.type in ("unreachable", "timeout")


def late_retry(seconds: float) -> str:
    """Return the words for a pause that would have ended after the deadline."""
    return f"a retry in {seconds:,.0f} s would come after the deadline"


def explain(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    url: str,
    model: str,
    authorization: str | None,
    request_id: str = "",
) -> LLMError | UserError:
    """Return the typed error of an answer that is not 2xx.

    authorization: the header that was sent; None: no key. No message contains its key, even if the
    server echoes it."""
    error = error_in(body)
    full_message, codes = message_of(error), frozenset(codes_of(error))
    message = server_words(full_message, authorization=authorization, max_chars=MAX_WORDS)
    searched = full_message.lower()
    kind = _kind_of_mistake(status, searched, codes)
    if kind is not None:
        has_key = authorization is not None
        text = _mistake_message(kind, status, message, url, model, has_key)
        return OperatorMistake(text, kind=kind)
    refusal = _refusal_type(status, frozenset(code.lower() for code in codes), searched)
    return LLMError(
        refusal.type,
        f"{url}: HTTP {status}: {message}",
        retryable=refusal.type not in ("overlong", "refused"),
        request_id=request_id,
        retry_after=retry_after_s(headers),
        status=status,
        cause=refusal.cause,
    )


def _kind_of_mistake(status: int, message: str, codes: frozenset[str]) -> str | None:
    """Return what the operator has to fix, a key of `MISTAKES`, or None for other errors."""
    if kinds := {_MISTAKES[code] for code in codes & _MISTAKES.keys()}:
        return min(kinds)
    if status == 402 or (status == 429 and any(_DAILY in code for code in codes)):
        return "quota"
    if 300 <= status < 400:
        return "redirect"
    if status in (401, 403):
        return "key"
    if status == 404:
        return "model" if "model" in message else "address"
    if status in (400, 500) and any(
        phrase in message for phrase in _NO_TEMPLATE + _TEMPLATE_REFUSES
    ):
        return "template"
    return "tokens" if status == 400 and _TOO_MANY_TOKENS in message else None


def _mistake_message(
    kind: str, status: int, message: str, url: str, model: str, has_key: bool
) -> str:
    """Return the problem and what the operator has to do."""
    if kind == "redirect":
        return (
            f"{url} redirects (HTTP {status}), which is not followed: name the address behind it "
            "in base_url (https instead of http, perhaps)"
        )
    if kind == "quota":
        return (
            f"{url} gives nothing more to this account (HTTP {status}: {message}): add credit or "
            "raise the limit at the provider, or wait until its quota is renewed"
        )
    if kind == "key":
        problem = "refused the API key" if has_key else "wants an API key and got none"
        return (
            f"{url} {problem}: put the value of the server's --api-key into the environment "
            "variable that api_key_env names (VLLM_API_KEY), of the judge JUDGE_UPSTREAM_API_KEY"
        )
    if kind == "model":
        return str(wrong_model(url, model, f"it said: {message}"))
    if kind == "address":
        return f"{url} is no OpenAI-compatible API (HTTP 404): base_url usually ends in /v1"
    if kind == "tokens":
        return (
            f"{url} refuses every request ({message}): lower max_tokens, or start the server with "
            "a larger --max-model-len"
        )
    if any(phrase in message.lower() for phrase in _NO_TEMPLATE):
        return (
            f"{url}: the model {model!r} has no chat template: start the server with "
            "--chat-template /path/to/template.jinja"
        )
    return (
        f"{url}: the chat template of {model!r} refuses the messages ({message}): start the "
        "server with another one, --chat-template /path/to/template.jinja"
    )


def wrong_model(url: str, model: str, hint: str) -> UserError:
    """Return the error of a server that does not have a model of that name."""
    return OperatorMistake(
        f"{url} does not serve a model named {model!r}: use the name that it "
        f"was started with (vllm serve NAME, or --served-model-name NAME); {hint}",
        kind="model",
    )


class _Refusal(NamedTuple):
    """type and cause of an `LLMError`."""

    type: str
    cause: str | None = None


def _refusal_type(status: int, codes: frozenset[str], message: str) -> _Refusal:
    """Return what a refusal means.

    codes, message: in small letters.
    """
    if is_overlong(status, codes, message):
        return _Refusal("overlong")
    if status != 429 and is_filtered(status, codes, message):
        return _Refusal("refused", "filtered_prompt")
    if status == 429:
        return _Refusal("overloaded")
    if status in _AWAY:
        return _Refusal("unreachable")
    if status >= 500 or status in _RETRY_4XX:
        return _Refusal("server_error")
    return _Refusal("refused")


def sample_error(error: LLMError | UserError, model: str, request_id: str) -> SampleError:
    """Return the error that a caller may see for a failure of the upstream server.

    It contains neither the upstream's address nor its answer; both are in the service's log, under
    the id that the message names."""
    log_reference = f"(the service's log: {request_id})"
    if isinstance(error, UserError):  # the operator must fix it
        mistake_kind = error.kind if isinstance(error, OperatorMistake) else "setup"
        mistake = MISTAKES[mistake_kind] + (f" {model!r}" if mistake_kind == "model" else "")
        return SampleError(
            "upstream", f"the upstream server: {mistake} {log_reference}", retryable=False
        )
    if error.cause == "left":
        return SampleError("cancelled", CAUSES["left"])
    if error.type == "overlong":
        return SampleError("overlong", f"{LLM_ERROR_TYPES['overlong']} {log_reference}")
    message = LLM_ERROR_TYPES[error.type]
    if error.status is not None:
        message += f", HTTP {error.status}"
    if error.cause is not None:
        message += f": {CAUSES[error.cause]}"
    if error.late_pause_s is not None:
        message += f"; {late_retry(error.late_pause_s)}"
    return SampleError("upstream", f"{message} {log_reference}", retryable=error.retryable)


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

    By its codes if they say so; by its words unless a code or the words speak of a rate.
    codes, message: in small letters."""
    if codes & _OVERLONG_CODES:
        return True
    if status not in _CONTENT_STATUS or codes & (_RATE_CODES | _FILTER_CODES):
        return False
    return _OVERLONG.search(message) is not None and not _RATE.search(message)


def is_filtered(status: int, codes: frozenset[str], message: str) -> bool:
    """Return True if a content filter refused the prompt.

    codes, message: in small letters.
    """
    if codes & _FILTER_CODES:
        return True
    return status in _CONTENT_STATUS and _FILTER.search(message) is not None
