"""The client of a page retriever.

with Retriever("http://127.0.0.1:8005") as retriever:
        hits, no_hits = retriever.search(["revenue by region", "rainfall in May"], top_k=3)
        image = retriever.image(hits[0].page_id)

All answers of one client come from one index: if its revision changes, `IndexChanged` is raised.
Below the client stand the searches as requests carry them, and the cache of page images.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import Field, ValidationError
from pydantic_core import to_json

from scorekit.client.transport import (
    RetryingSession,
    is_retryable,
    json_of,
    parse_response,
    raise_refusal,
    resolve_api_key,
    service_url,
    without_bom,
)
from scorekit.errors import IndexChanged, RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.net.loops import ForkSafeClient, gather_or_cancel
from scorekit.net.masking import server_words
from scorekit.net.retry import Deadline, first_answer_limit_s
from scorekit.retrieval.wire import REVISION_HEADER, IndexInfo, Page, PageHit
from scorekit.schemas import WireAnswer, WireError
from scorekit.scorers import check_is_list

#: The hits of a search, best first, or the error of one that failed.
SearchOutcome = list[PageHit] | SampleError
#: A query, and the ids of pages to leave out.
Search = tuple[str, tuple[str, ...]]

_WHAT = "page retriever"
_PNG = b"\x89PNG\r\n\x1a\n"
#: Total bytes of the images that a client caches.
_KEPT_BYTES = 256 * 2**20


class Retriever(ForkSafeClient["_Client"]):
    """The client of one retriever, for code that is not async. Threads may share it.

    A forked child creates its own connections.

    url: of the service.
    api_key: default from SCOREKIT_API_KEY.
    timeout_s: seconds for one request.
    deadline_s: seconds for one request with its retries (no connection, 429, 502, 503, 504,
    transient errors of searches) and the pauses between them.
    max_in_flight: concurrent requests.
    first_answer_s: seconds to wait for a service that has never answered; None: 10 s in a notebook
    or at a prompt, else until the deadline.

    Raises UserError if the URL is not http.

    Every call may raise ServiceUnreachable if there is no valid answer until the deadline;
    IndexChanged if another index answers than before; RequestError if the request is refused;
    UserError if another service answers.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
        max_in_flight: int = 8,
        first_answer_s: float | None = None,
    ) -> None:
        server_parts, key, first_revision = service_url(url), resolve_api_key(api_key), _Seen()
        base, first_answer_s = server_parts.address, first_answer_limit_s(first_answer_s)

        def make() -> _Client:
            limits: dict[str, Any] = {"deadline_s": deadline_s, "max_in_flight": max_in_flight}
            limits["first_answer_s"] = first_answer_s
            server = RetryingSession(server_parts, key, _WHAT, timeout_s=timeout_s, **limits)
            return _Client(base, server, timeout_s, first_revision)

        self.url = base
        super().__init__("retriever's client", make, _Client.close)

    def info(self) -> IndexInfo:
        """Return the index that answers now, without a cache, so that a run can check it."""
        return self.run(lambda client: client.info())

    def search(
        self,
        queries: Sequence[str],
        top_k: int = 10,
        exclude: Sequence[Sequence[str]] | None = None,
    ) -> list[SearchOutcome]:
        """Return the hits of each query, in order; an empty list if there are none.

        Equal searches are sent once, in as few requests as the service allows.

        exclude: for each query, ids of pages to leave out. A query that is invalid (empty, NUL, not
        Unicode) or fails alone has a SampleError in its place. Raises UserError for what is no list
        of queries, or no list of lists of ids.
        """
        check_is_list("queries", queries)
        queries = list(queries)
        excluded: Sequence[Sequence[str]] = [()] * len(queries)
        if exclude is not None:
            check_is_list("exclude", exclude)
            excluded = list(exclude)
            for index, pages in enumerate(excluded):
                check_is_list(f"exclude.{index}", pages)
            if len(excluded) != len(queries):
                raise UserError(f"exclude: {len(excluded)} lists for {len(queries)} queries")
        searches = [
            (query, tuple(dict.fromkeys(pages)))
            for query, pages in zip(queries, excluded, strict=True)
        ]
        return self.run(lambda client: client.search(searches, top_k))

    def page(self, page_id: str) -> Page:
        """Return size and text of a page. Raises RequestError (`not_found`) if there is none."""
        return self.run(lambda client: client.page(page_id))

    def image(self, page_id: str) -> bytes:
        """Return the page's image, a PNG; recently used ones are cached.

        Raises RequestError (`not_found`) if the page does not exist."""
        return self.run(lambda client: client.image(page_id))


class _Seen:
    """The revision that answered first. A forked child has its parent's."""

    revision: str | None = None


class _Client:
    """The async part of `Retriever`, on its event loop."""

    def __init__(self, base: str, server: RetryingSession, timeout_s: float, seen: _Seen) -> None:
        self._base, self._server = base, server
        self._timeout_s = timeout_s
        self._seen = seen
        self._limits: SearchLimits | None = None
        self._limits_lock = asyncio.Lock()
        self._image_cache = PageImageCache(self._fetch_image, _KEPT_BYTES)

    async def close(self) -> None:
        await self._server.close()

    async def info(self) -> IndexInfo:
        body = await self._get_json("/v1/info")
        try:
            index_info = IndexInfo.model_validate(body)
            self._limits = SearchLimits.model_validate(body)
        except ValidationError:
            name = body.get("service") if isinstance(body, dict) else None
            server = f"the service {name[:40]!r}" if isinstance(name, str) else "another service"
            raise UserError(f"{self._base} is {server}, not a {_WHAT}. Set its URL") from None
        self._check_revision(index_info.revision)
        return index_info

    def _check_revision(self, revision: str) -> None:
        self._seen.revision = self._seen.revision or revision
        if revision != self._seen.revision:
            raise IndexChanged(self._base, self._seen.revision, revision)

    # -- searches ---------------------------------------------------------------------------------

    async def search(self, searches: list[Search], top_k: int) -> list[SearchOutcome]:
        outcome_by_search: dict[Search, SearchOutcome | None] = {
            search: find_search_error(search) for search in searches
        }
        sendable = [search for search, error in outcome_by_search.items() if error is None]
        if sendable:
            batches = in_requests(sendable, await self._get_limits())
            answers = await gather_or_cancel(self._answers(batch, top_k) for batch in batches)
            outcome_by_search.update(zip(sendable, chain.from_iterable(answers), strict=True))
        outcomes = [outcome_by_search[search] for search in searches]
        return [[*o] if isinstance(o, list) else o for o in outcomes]  # type: ignore[misc]

    async def _get_limits(self) -> SearchLimits:
        async with self._limits_lock:
            if self._limits is None:
                await self.info()
        assert self._limits is not None
        return self._limits

    async def _answers(self, searches: list[Search], top_k: int) -> list[SearchOutcome]:
        """Return the outcomes of one request; split it if a proxy has a smaller limit."""
        try:
            async with self._server.slots:
                deadline = self._server.deadline()
                with self._server.outage_log.watched(deadline):
                    return await self._search_with_retries(searches, top_k, deadline)
        except RequestError as error:
            if error.type != "too_large":
                raise
        if len(searches) == 1:
            return [SampleError("invalid_input", "the query is too long for the service")]
        half = (len(searches) + 1) // 2
        first = await self._answers(searches[:half], top_k)
        return first + await self._answers(searches[half:], top_k)

    async def _search_with_retries(
        self, searches: list[Search], top_k: int, deadline: Deadline
    ) -> list[SearchOutcome]:
        """Return the outcomes, with transient errors retried until the deadline."""
        outcome_by_search: dict[Search, SearchOutcome] = {}
        missing = searches
        try:
            async for attempt in self._server.tries(deadline):
                with attempt:
                    outcome_by_search.update(await self._search_once(missing, top_k, deadline))
                    missing = [
                        search for search in missing if is_transient(outcome_by_search[search])
                    ]
                    if missing:
                        message = f"{self._base}: searches had transient errors"
                        raise RequestError("unavailable", message)
                    self._server.outage_log.answered()
        except (ServiceUnreachable, RequestError) as error:
            if not is_retryable(error) or not outcome_by_search.keys() >= set(missing):
                raise
        return [outcome_by_search[search] for search in searches]

    async def _search_once(
        self, searches: list[Search], top_k: int, deadline: Deadline
    ) -> dict[Search, SearchOutcome]:
        body = to_json(
            {
                "queries": [body_of(search) for search in searches],
                "top_k": top_k,
                "timeout_s": deadline.for_service(self._timeout_s),
            }
        )
        response = self._check_status(await self._server.once("POST", "/v1/search", deadline, body))
        with parse_response(self._base, _WHAT):
            answer = SearchAnswer.model_validate_json(without_bom(response.content))
            self._check_revision(answer.index.revision)
            pairs = zip(searches, answer.results, strict=True)
            return {search: outcome_of(result, top_k) for search, result in pairs}

    # -- pages ------------------------------------------------------------------------------------

    async def page(self, page_id: str) -> Page:
        body = await self._get_json(_path_of(page_id))
        with parse_response(self._base, _WHAT):
            page = Page.model_validate(body)
        if page.page_id != page_id:
            raise ServiceUnreachable(self._base, "it answered with another page", retryable=False)
        return page

    async def image(self, page_id: str) -> bytes:
        return await self._image_cache.get(page_id)

    async def _fetch_image(self, page_id: str) -> bytes:
        path = f"{_path_of(page_id)}/image?format=png"
        image = (await self._get(path)).content
        if not image.startswith(_PNG):
            raise ServiceUnreachable(self._base, "an image that is not a PNG", retryable=False)
        return image

    # -- requests ---------------------------------------------------------------------------------

    async def _get_json(self, path: str) -> Any:
        response = await self._get(path)
        with parse_response(self._base, _WHAT):
            return json_of(response.content)

    async def _get(self, path: str) -> httpx.Response:
        """Return the answer to a GET, with retries."""
        return await self._server.request("GET", path, read=self._check_status)

    def _check_status(self, response: httpx.Response) -> httpx.Response:
        """Return an answer of status 200. Raises the typed error of a refusal, IndexChanged."""
        if response.status_code != 200:
            raise_refusal(self._base, response, _WHAT)
        if revision := response.headers.get(REVISION_HEADER):
            self._check_revision(revision)
        return response


def _path_of(page_id: str) -> str:
    """Return the path of a page.

    The id becomes one segment, dots included. A slash would split it even when it is quoted, and no
    page id has one."""
    if not page_id or "/" in page_id:
        raise RequestError("not_found", "a page id is not empty and has no slash")
    segment = quote(page_id, safe="", errors="surrogatepass").replace(".", "%2E")
    return f"/v1/pages/{segment}"


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


class PageImageCache:
    """Images by page id, for one event loop. The least recently used ones are dropped first.

    A call for an image that is already being fetched waits for it.

    fetch: fetches one image; its error goes to all waiting calls and is not cached.
    most_bytes: limit of the cache; an image over it is returned but not cached.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], most_bytes: int) -> None:
        self._fetch = fetch
        self._most_bytes = most_bytes
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._fetches: dict[str, asyncio.Task[bytes]] = {}

    async def get(self, page_id: str) -> bytes:
        """Return the image. Raises what `fetch` raises."""
        if page_id in self._images:
            self._images.move_to_end(page_id)
            return self._images[page_id]
        if page_id not in self._fetches:
            task = asyncio.create_task(self._fetch_and_cache(page_id))
            self._fetches[page_id] = task
            task.add_done_callback(lambda _: self._fetches.pop(page_id))
        # A cancelled call does not end the fetch for the others.
        return await asyncio.shield(self._fetches[page_id])

    async def _fetch_and_cache(self, page_id: str) -> bytes:
        image = await self._fetch(page_id)
        if len(image) <= self._most_bytes:
            self._images[page_id] = image
            self._bytes += len(image)
        while self._bytes > self._most_bytes:
            _, dropped = self._images.popitem(last=False)
            self._bytes -= len(dropped)
        return image
