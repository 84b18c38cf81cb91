"""Searches as they go to a retriever, and what comes back for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.retrieval.wire import PageHit
from scorekit.schemas import WireAnswer, WireError

#: What a search found, best first, or why it has no answer.
Found = list[PageHit] | SampleError
#: A query and the pages that it is not to find.
Search = tuple[str, tuple[str, ...]]

#: Bytes of a body beside its searches: options, brackets.
_FRAME = 256


class SearchResult(WireAnswer):
    """What a retriever answers for one search: `hits` where `ok`, else `error`."""

    ok: bool
    hits: list[PageHit] | None = None
    error: WireError | None = None


class SearchLimits(WireAnswer):
    """Of one request, as the service tells them: searches, and bytes of its body."""

    max_samples: int = Field(64, ge=1)
    max_body_bytes: int = Field(2**20, gt=_FRAME)


class _Index(WireAnswer):
    revision: str


class SearchAnswer(WireAnswer):
    """A retriever's answer to a request: result k is of search k."""

    index: _Index
    results: list[SearchResult]


def body_of(search: Search) -> Mapping[str, Any]:
    """The search as it stands in a request."""
    query, excluded = search
    return {"query": query, "exclude": excluded} if excluded else {"query": query}


def in_requests(searches: Sequence[Search], limits: SearchLimits) -> list[list[Search]]:
    """Searches by request; one that is too large for any stands alone."""
    requests: list[list[Search]] = []
    size = 0
    for one in searches:
        length = len(to_json(body_of(one))) + 1
        full = requests and len(requests[-1]) >= limits.max_samples
        if not requests or full or size + length > limits.max_body_bytes:
            requests.append([])
            size = _FRAME
        requests[-1].append(one)
        size += length
    return requests


def fault_of(search: Search) -> SampleError | None:
    """Why no service should be asked this."""
    query, excluded = search
    if not query.strip():
        return SampleError("invalid_input", "an empty query finds nothing")
    if "\0" in query:
        return SampleError("invalid_input", f"NUL character at position {query.index(chr(0))}")
    for text in (query, *excluded):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return SampleError("invalid_input", f"lone surrogate at position {error.start}")
    return None


def outcome_of(result: SearchResult, top_k: int) -> Found:
    """Raises ValueError for a result that is neither hits nor an error."""
    if result.ok and result.hits is not None and len(result.hits) <= top_k:
        return result.hits
    if result.ok or result.error is None:
        raise ValueError("a result without its hits or its error")
    error = result.error
    return SampleError(error.type, error.message, retryable=error.retryable)


def may_pass(outcome: Found) -> bool:
    """Whether the same search may find something when it is asked again."""
    return isinstance(outcome, SampleError) and outcome.retryable
