"""Every error that crosses a boundary of the project.

    ScorekitError
    ├── UserError           a mistake of the user: one clear line, exit code 2
    ├── ServiceUnreachable  no answer from a service: refused, cut off, or not HTTP
    │   ├── ResponseLost    cut off after the request was sent: it may have crashed the service
    │   ├── ServerEnded     the process of a server that we started has ended
    │   ├── IndexChanged    answers come from another page index than before
    │   └── ModelChanged    scores come from another model than before
    └── ServiceError        carries `type`, `message`, `retryable`, and the HTTP status of a request
        ├── SampleError     one sample failed; its siblings may be fine
        └── RequestError    a whole request was refused

The two type lists are closed: a client may switch on them. No error has the password of a URL,
whichever part of the project named it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from scorekit.net.masking import server_words, without_passwords

#: Types of a failed sample. The first two are caused by the text, the others by the service.
SampleErrorType = Literal[
    "invalid_input", "overlong", "non_finite", "model_failure", "timeout", "cancelled", "upstream"
]
SAMPLE_ERROR_TYPES: tuple[SampleErrorType, ...] = get_args(SampleErrorType)
#: Types that the text causes: another request gets the same answer.
TEXT_ERROR_TYPES = frozenset({"invalid_input", "overlong"})
_RETRYABLE_SAMPLE_TYPES = frozenset({"timeout", "cancelled", "upstream"})


def is_transient(error: Mapping[str, Any]) -> bool:
    """Return True if a later run may succeed where a sample failed with this wire error.

    An upstream error counts although an immediate retry is useless (a refused key): the server
    behind the service may be repaired by then."""
    return bool(error["retryable"]) or error["type"] == "upstream"


#: Type of a refused request -> (HTTP status, whether the same request may succeed later).
REQUEST_ERRORS: dict[str, tuple[int, bool]] = {
    "unauthorized": (401, False),
    "not_found": (404, False),
    "method_not_allowed": (405, False),
    "slow_request": (408, True),
    "too_large": (413, False),
    "invalid_request": (422, False),
    "overloaded": (429, True),
    "internal": (500, False),
    "unavailable": (503, True),
    "timeout": (504, True),
}


def _mask(text: str) -> str:
    """Return the text without passwords of URLs; most texts have none."""
    return without_passwords(text) if "@" in text else text


class ScorekitError(Exception):
    """Base of all errors of this project.

    exit_code: exit code of a command that it ends.
    word: the word that begins its line."""

    exit_code = 1
    word = "error"


class UserError(ScorekitError):
    """A mistake that the user can fix: one line that says what, where, and what to do.

    lines: one line each for further mistakes that are fixed together (the wrong rows of a file).
    """

    exit_code = 2

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(_mask(message))
        self.lines = tuple(_mask(line) for line in lines)


class ServiceUnreachable(ScorekitError):
    """A service gave no answer that could be parsed.

    retryable: whether a retry may help (not for a wrong URL or another program behind it).
    """

    def __init__(self, url: str, reason: str, *, retryable: bool = True) -> None:
        url, reason = _mask(url), _mask(reason)
        super().__init__(url, reason)
        self.url = url
        self.reason = reason
        self.retryable = retryable
        self.exit_code = 1 if retryable else 2

    def __str__(self) -> str:
        state = "cannot be reached" if self.retryable else "is not what is wanted"
        return f"{self.url} {state}: {self.reason}"


class ResponseLost(ServiceUnreachable):
    """The connection broke after a request was sent and before its answer."""

    def __str__(self) -> str:
        return f"{self.url} ended, or closed the connection, over a request: {self.reason}"


class ServerEnded(ServiceUnreachable):
    """The process of a server that was started for this run has ended."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason, retryable=False)

    def __str__(self) -> str:
        return f"{self.url} has ended: {self.reason}"


class IndexChanged(ServiceUnreachable):
    """A retriever answers from another index than before. Answers of the two cannot be mixed."""

    def __init__(self, url: str, expected: str, current: str) -> None:
        first, second = (server_words(revision, max_chars=80) for revision in (expected, current))
        reason = f"its index changed from revision {first} to {second}: start the run anew"
        super().__init__(url, reason, retryable=False)
        self.expected, self.current = expected, current

    def __reduce__(self) -> tuple[type[IndexChanged], tuple[str, str, str]]:
        return type(self), (self.url, self.expected, self.current)


class ModelChanged(ServiceUnreachable):
    """A service answers with another model than before. Scores of the two cannot be mixed."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason, retryable=False)


class ServiceError(ScorekitError):
    """A failure that travels as `{"type", "message", "retryable"}`."""

    def __init__(self, type: str, message: str, *, retryable: bool) -> None:
        message = _mask(message)
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    def wire(self) -> dict[str, Any]:
        """Return the error as an answer carries it."""
        return {"type": self.type, "message": self.message, "retryable": self.retryable}


class SampleError(ServiceError):
    """One sample could not be scored; `type` is one of `SAMPLE_ERROR_TYPES`.

    id, index: the caller's name for the sample and its position in the call, if they are known.
    retryable: overrides the default of the type.
    paid: fields of the result with what a judge paid.
    """

    def __init__(
        self,
        type: str,
        message: str,
        *,
        id: str | None = None,
        index: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        if type not in SAMPLE_ERROR_TYPES:
            raise ValueError(f"unknown sample error type {type!r}")
        if retryable is None:
            retryable = type in _RETRYABLE_SAMPLE_TYPES
        super().__init__(type, message, retryable=retryable)
        self.id = id
        self.index = index
        self.paid: Mapping[str, Any] = {}

    @classmethod
    def of_answer(
        cls,
        type: str,
        message: str,
        *,
        retryable: bool,
        id: str | None = None,
        index: int | None = None,
    ) -> SampleError:
        """Return the error that a service's answer states.

        A type that only a newer service knows becomes `upstream`; the message names it."""
        if type not in SAMPLE_ERROR_TYPES:
            type, message = "upstream", f"{type[:80]}: {message}"
        return cls(type, message, id=id, index=index, retryable=retryable)

    def __str__(self) -> str:
        if self.index is None:
            return super().__str__()
        name = "" if self.id is None else f" ({self.id})"
        return f"sample {self.index}{name}: {super().__str__()}"


class RequestError(ServiceError):
    """A whole request failed. `type` is a key of `REQUEST_ERRORS`.

    `retry_after` is in seconds; `request_id` is the service's name for the request.
    """

    def __init__(
        self,
        type: str,
        message: str,
        *,
        retry_after: float | None = None,
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        default_status, retryable = REQUEST_ERRORS[type]
        super().__init__(type, message, retryable=retryable)
        self.status = status or default_status
        # The user can fix a wrong URL, key or option. Everything else is the service's.
        self.exit_code = 2 if self.status in (401, 403, 404, 405, 415, 422) else 1
        self.retry_after = retry_after
        self.request_id = request_id


#: The name of `ResponseLost` in version 0.2.
AnswerLost = ResponseLost
