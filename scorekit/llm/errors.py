"""Errors of requests to an OpenAI-compatible server.

A mistake of the operator is a `UserError` that says what to do. Every other failure is an
`LLMError` of one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from scorekit.errors import ScorekitError, UserError
from scorekit.net.retry import retry_after_s

#: `LLMError.type` -> its meaning, for a caller who does not know which server a service uses.
LLM_ERROR_TYPES = {
    # a refused or broken connection, or HTTP 502, 503, 504
    "unreachable": "the upstream server cannot be reached",
    "timeout": "the upstream server did not answer in time",
    # HTTP 429
    "overloaded": "the upstream server has too many requests",
    # HTTP 408, 409 or another 5xx, or an answer that the server itself broke off
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
_AWAY = frozenset({502, 503, 504})
_RETRY_4XX = frozenset({408, 409})
_NO_TEMPLATE = ("default chat template is no longer allowed", "chat_template is not set")
_TEMPLATE_REFUSES = ("system role not supported", "roles must alternate")
_TOO_MANY_TOKENS = "cannot be greater than max_model_len"
_OVERLONG = ("maximum context length", "context_length_exceeded", "maximum model length")
#: Error codes of providers (`_codes`) -> what the operator has to fix. They hold for any status:
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
    """An error of every request until the operator fixes its cause. kind: a key of `MISTAKES`."""

    def __init__(self, message: str, lines: Sequence[str] = (), kind: str = "setup") -> None:
        super().__init__(message, lines)
        self.kind = kind


class LLMError(ScorekitError):
    """One request failed for good, after its attempts. `type` is a key of `LLM_ERROR_TYPES`.

    retryable: whether the same request may succeed later. request_id: the X-Request-Id that failed
    (that of a part if the request was split). retry_after: seconds that the server asked for.
    status: the HTTP status, if there was an answer.
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
    ) -> None:
        if type not in LLM_ERROR_TYPES:
            raise ValueError(f"unknown LLM error type {type!r}")
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.retryable = retryable
        self.request_id = request_id
        self.retry_after = retry_after
        self.status = status

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    @property
    def server_is_away(self) -> bool:
        """Return True if the server may be restarting and is worth waiting for
        (`wait_for_server_s`)."""
        return self.type in ("unreachable", "timeout")


def explained(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    url: str,
    model: str,
    key: str | None,
    request_id: str = "",
) -> LLMError | UserError:
    """Return the typed error of an answer that is not 2xx.

    No message contains the key, even if the server echoes it."""
    error = _error_in(body)
    message = _server_message(error, key)
    kind = _kind_of_mistake(status, message.lower(), frozenset(_codes(error)))
    if kind is not None:
        return OperatorMistake(_mistake_message(kind, status, message, url, model, key), kind=kind)
    return _refusal(status, headers, f"{url}: HTTP {status}: {message}", request_id)


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
    kind: str, status: int, message: str, url: str, model: str, key: str | None
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
        problem = f"{url} refused the API key" if key else f"{url} wants an API key and got none"
        return (
            f"{problem}: put the value of the server's --api-key into the environment variable "
            "that api_key_env names (VLLM_API_KEY)"
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


def _refusal(status: int, headers: Mapping[str, str], message: str, request_id: str) -> LLMError:
    if status == 429:
        kind = "overloaded"
    elif status in _AWAY:
        kind = "unreachable"
    elif status >= 500 or status in _RETRY_4XX:
        kind = "server_error"
    elif any(phrase in message.lower() for phrase in _OVERLONG):
        kind = "overlong"
    else:
        kind = "refused"
    return LLMError(
        kind,
        message,
        retryable=kind not in ("overlong", "refused"),
        request_id=request_id,
        retry_after=retry_after_s(headers),
        status=status,
    )


def _error_in(body: bytes) -> Any:
    """Return a body's error: an object if there is one, else a text. Gemini wraps it in a list."""
    try:
        content: Any = from_json(body)
    except ValueError:
        return body[:4096].decode(errors="replace")
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    return content.get("error", content) if isinstance(content, dict) else content


def _codes(error: Any) -> Iterator[str]:
    """Yield an error's codes: `code` and `type` (OpenAI), `reason` and each `quotaId` (Google)."""
    if not isinstance(error, dict):
        return
    details = error.get("details")
    objects = [error, *(details if isinstance(details, list) else ())]
    for entry in [entry for entry in objects if isinstance(entry, dict)]:
        violations = entry.get("violations")
        quotas = violations if isinstance(violations, list) else ()
        yield from (str(entry[name]) for name in ("code", "type", "reason") if name in entry)
        yield from (str(quota.get("quotaId")) for quota in quotas if isinstance(quota, dict))


def _server_message(error: Any, key: str | None) -> str:
    """Return the server's message as one short line."""
    message = error
    if isinstance(message, dict):
        message = message.get("message") or message.get("error") or message.get("detail") or message
    line = " ".join(str(message).split())
    return (line.replace(key, "***") if key else line)[:300]
