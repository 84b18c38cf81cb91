"""Parse the answers and errors of OpenAI-compatible embedding servers."""

from __future__ import annotations

import base64
import re
import sys
from array import array
from typing import Any

import httpx

from scorekit.client.transport import json_of, key_hint
from scorekit.errors import RequestError, SampleError, ServiceUnreachable
from scorekit.net.addresses import proxy_note
from scorekit.net.masking import server_words
from scorekit.net.retry import retry_after_s

#: Statuses that a text, or the number of texts, may cause.
_TEXT_STATUSES = frozenset({400, 413, 422})
#: Longest words of a refusal in an error: scorekit's embedder names several texts in it.
_MAX_MESSAGE_CHARS = 2000
#: The form in which scorekit's embedder names a refused text.
_NAMED_TEXT = re.compile(r"\binput\.(\d{1,9}): (invalid_input|overlong): ")
#: Words of other servers' errors about a text that is too long.
_TOO_LONG = re.compile(r"token|too long|context length|context_length|max(imum)?[ _]length")


class RefusedTexts(Exception):
    """A refusal that a text may have caused. message: the server's, which may quote the text."""

    def __init__(self, error: RequestError, message: str) -> None:
        super().__init__(error, message)
        self.error, self._message = error, message

    def of_text(self) -> SampleError:
        """Return the error of the only text of the request."""
        too_long = self.error.status == 413 or _TOO_LONG.search(self._message.lower())
        return _refusal("overlong" if too_long else "invalid_input", f"HTTP {self.error.status}")

    def named(self, num_texts: int) -> dict[int, SampleError]:
        """Return errors by index, if the service named the texts."""
        type_by_index = {int(index): type for index, type in _NAMED_TEXT.findall(self._message)}
        return {
            index: _refusal(type, "named in its refusal")
            for index, type in type_by_index.items()
            if index < num_texts
        }


def raise_failure(base: str, response: httpx.Response) -> None:
    """Raise the typed error of an answer that is not 200, from any kind of server."""
    status, (type, message) = response.status_code, _type_and_message(response)
    authorization = response.request.headers.get("authorization", "")
    message = server_words(message, authorization=authorization, max_chars=_MAX_MESSAGE_CHARS)
    description = f"{base}: HTTP {status}" + (f": {message}" if message else proxy_note(base))
    if status in _TEXT_STATUSES:
        error_type = "too_large" if status == 413 else "invalid_request"
        raise RefusedTexts(RequestError(error_type, description, status=status), message)
    if status in (401, 403):
        hint = f"{key_hint(authorization)} SCOREKIT_API_KEY (or api_key=)"
        raise RequestError("unauthorized", f"{description}; {hint}")
    if status < 500 and status not in (408, 424, 429):
        raise ServiceUnreachable(
            base,
            f"HTTP {status}: {message or 'no embeddings' + proxy_note(base)}",
            retryable=False,
        )
    if type == "internal":  # of scorekit's embedder: it would fail again
        raise RequestError("internal", description)
    error_type = "overloaded" if status == 429 else "unavailable"
    retry_after = retry_after_s(response.headers)
    raise RequestError(error_type, description, status=status, retry_after=retry_after)


def _type_and_message(response: httpx.Response) -> tuple[str, str]:
    """Return type and message of a refusal by scorekit, OpenAI, TEI or vLLM."""
    try:
        body = json_of(response.content)
    except ValueError:
        return "", ""
    inner = body.get("error") if isinstance(body, dict) else None
    if isinstance(inner, dict):
        body = inner
    if not isinstance(body, dict):
        return "", ""
    message = body.get("message") or body.get("error") or body.get("detail") or ""
    return str(body.get("type")), str(message)


def vectors_in_order(rows: list[dict[str, Any]], count: int) -> list[list[float]]:
    """Return vectors in the order of their index.

    Raises ValueError, KeyError, TypeError unless there is exactly one for each text."""
    vector_by_index = {row["index"]: row["embedding"] for row in rows}
    if len(rows) != count:
        raise ValueError(f"{len(rows)} vectors for {count} texts")
    return [_numbers(vector_by_index[k]) for k in range(count)]


def _numbers(raw: Any) -> list[float]:
    """Return a vector from a list of numbers, or from the base64 of its float32 bytes."""
    if isinstance(raw, str):
        floats = array("f", base64.b64decode(raw, validate=True))
        if sys.byteorder == "big":
            floats.byteswap()
        return floats.tolist()
    try:
        numbers = [float(number) for number in raw]
    except OverflowError:
        raise ValueError("a whole number of 309 digits or more") from None
    if not numbers:
        raise ValueError("an empty vector")
    return numbers


def find_text_error(text: str) -> SampleError | None:
    """Return the error of a text that no server should get, or None."""
    if not text:
        return SampleError("invalid_input", "an empty text has no vector")
    if "\0" in text:
        return SampleError("invalid_input", f"NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return SampleError("invalid_input", f"lone surrogate at position {error.start}")
    return None


def _refusal(type: str, detail: str) -> SampleError:
    """Return the error of a refused text, without the server's words: they may quote the text."""
    return SampleError(type, f"the embedding server refused the text ({detail})")
