"""Searches as a retriever's requests carry them, and the outcome of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic_core import to_json

from scorekit.errors import SampleError
from scorekit.net.masking import server_words
from scorekit.retrieval.wire import PageHit
from scorekit.schemas import WireAnswer, WireError

#: The hits of a search, best first, or the error of one that failed.
SearchOutcome = list[PageHit] | SampleError
#: A query, and the ids of pages to leave out.
Search = tuple[str, tuple[str, ...]]

#: Bytes of a body besides its searches: options, brackets.
_FRAME = 256


class SearchResult(WireAnswer):
    """A retriever's answer to one search: `hits` if `ok`, else `error`."""

    ok: bool
    hits: list[PageHit] | None = None
    error: WireError | None = None


class SearchLimits(WireAnswer):
    """Limits of one request, as the service states them: searches, and bytes of the body."""

    max_samples: int = Field(64, ge=1)
    max_body_bytes: int = Field(2**20, gt=_FRAME)


class _Index(WireAnswer):
    revision: str


class SearchAnswer(WireAnswer):
    """A retriever's answer to a request: result k is of search k."""

    index: _Index
    results: list[SearchResult]


def body_of(search: Search) -> Mapping[str, Any]:
    """Return the search as a request carries it."""
    query, excluded = search
    return {"query": query, "exclude": excluded} if excluded else {"query": query}


def in_requests(searches: Sequence[Search], limits: SearchLimits) -> list[list[Search]]:
    """Return searches grouped into requests; one that exceeds the limits is alone."""
    requests: list[list[Search]] = []
    size = 0
    for search in searches:
        length = len(to_json(body_of(search))) + 1
        is_full = requests and len(requests[-1]) >= limits.max_samples
        if not requests or is_full or size + length > limits.max_body_bytes:
            requests.append([])
            size = _FRAME
        requests[-1].append(search)
        size += length
    return requests


def find_search_error(search: Search) -> SampleError | None:
    """Return the error of a search that no service should get, or None."""
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


def outcome_of(result: SearchResult, top_k: int) -> SearchOutcome:
    """Return the hits or the error. Raises ValueError for a result that has neither."""
    if result.ok and result.hits is not None and len(result.hits) <= top_k:
        return result.hits
    if result.ok or result.error is None:
        raise ValueError("a result without its hits or its error")
    error = result.error
    message = server_words(error.message)
    return SampleError.of_answer(error.type, message, retryable=error.retryable)


def is_transient(outcome: SearchOutcome) -> bool:
    """Return True if the same search may succeed when it is retried."""
    return isinstance(outcome, SampleError) and outcome.retryable
