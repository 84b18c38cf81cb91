"""What an OpenAI-compatible embedding server answers, in our own words."""

from __future__ import annotations

import base64
import re
import sys
from array import array
from typing import Any

import httpx
from pydantic_core import from_json

from scorekit.errors import RequestError, SampleError, ServiceUnreachable
from scorekit.net.retry import retry_after_s

#: Statuses that may be the fault of a text, or of how many they are.
_OF_TEXTS = frozenset({400, 413, 422})
#: Our service's words for a text that it does not take.
_NAMED = re.compile(r"\binput\.(\d{1,9}): (invalid_input|overlong): ")
#: Others' words for one that is too long.
_TOO_LONG = re.compile(r"token|too long|context length|context_length|max(imum)?[ _]length")


class RefusedTexts(Exception):
    """A refusal that may be a text's fault. said: the server's words, which may quote it."""

    def __init__(self, error: RequestError, said: str) -> None:
        super().__init__(error, said)
        self.error, self._said = error, said

    def of_text(self) -> SampleError:
        """The fault of the only text."""
        too_long = self.error.status == 413 or _TOO_LONG.search(self._said.lower())
        return _fault("overlong" if too_long else "invalid_input", f"HTTP {self.error.status}")

    def named(self, most: int) -> dict[int, SampleError]:
        """Faults by index, where our service names them."""
        found = {int(k): type for k, type in _NAMED.findall(self._said)}
        return {k: _fault(type, "named in its refusal") for k, type in found.items() if k < most}


def raise_failure(base: str, response: httpx.Response) -> None:
    """The typed error of an answer that is not 200, whoever's words it has."""
    status, (type, said) = response.status_code, _words(response)
    told = f"{base}: HTTP {status}" + (f": {said}" if said else "")
    if status in _OF_TEXTS:
        kind = "too_large" if status == 413 else "invalid_request"
        raise RefusedTexts(RequestError(kind, told, status=status), said)
    if status in (401, 403):
        sent = "authorization" in response.request.headers
        what = "the key was refused: check" if sent else "no key was sent: set"
        raise RequestError("unauthorized", f"{told}; {what} SCOREKIT_API_KEY (or api_key=)")
    if status < 500 and status not in (408, 424, 429):
        raise ServiceUnreachable(base, f"HTTP {status}: {said or 'no embeddings'}", retryable=False)
    if type == "internal":  # our service's own word: it would fail again
        raise RequestError("internal", told)
    kind = "overloaded" if status == 429 else "unavailable"
    wait = retry_after_s(response.headers)
    raise RequestError(kind, told, status=status, retry_after=wait)


def _words(response: httpx.Response) -> tuple[str, str]:
    """Type and message of a refusal, in our shape, OpenAI's, TEI's or vLLM's; a line of it."""
    try:
        told = from_json(response.content)
    except ValueError:
        return "", ""
    inner = told.get("error") if isinstance(told, dict) else None
    if isinstance(inner, dict):
        told = inner
    if not isinstance(told, dict):
        return "", ""
    said = told.get("message") or told.get("error") or told.get("detail") or ""
    return str(told.get("type")), " ".join(str(said).split())[:2000]


def vectors_in_order(rows: list[dict[str, Any]], count: int) -> list[list[float]]:
    """Vectors by index. Raises ValueError, KeyError, TypeError where there is not one of each."""
    by_index = {row["index"]: row["embedding"] for row in rows}
    if len(rows) != count:
        raise ValueError(f"{len(rows)} vectors for {count} texts")
    return [_numbers(by_index[k]) for k in range(count)]


def _numbers(written: Any) -> list[float]:
    """Numbers, or the base64 of their float32 bytes."""
    if isinstance(written, str):
        packed = array("f", base64.b64decode(written, validate=True))
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tolist()
    numbers = [float(number) for number in written]
    if not numbers:
        raise ValueError("an empty vector")
    return numbers


def fault_of(text: str) -> SampleError | None:
    """Why no server should be asked about this text."""
    if not text:
        return SampleError("invalid_input", "an empty text has no vector")
    if "\0" in text:
        return SampleError("invalid_input", f"NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return SampleError("invalid_input", f"lone surrogate at position {error.start}")
    return None


def _fault(type: str, how: str) -> SampleError:
    """No word of the server's: it may quote the text."""
    return SampleError(type, f"the embedding server does not take it ({how})")
