"""The client of a page retriever.

with Retriever("http://127.0.0.1:8005") as retriever:
    hits, none = retriever.search(["revenue by region", "rainfall in May"], top_k=3)
    picture = retriever.image(hits[0].page_id)

All answers of one client come from one index: where its revision changes, `IndexChanged` is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from scorekit.client.transport import (
    OneServer,
    checked_url,
    is_retryable,
    own_key,
    raise_refusal,
    understood,
)
from scorekit.errors import (
    IndexChanged,
    RequestError,
    SampleError,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.own_loop import OwnLoop
from scorekit.net.retry import Deadline
from scorekit.retrieval.pictures import KeptPictures
from scorekit.retrieval.searches import (
    Found,
    Search,
    SearchAnswer,
    SearchLimits,
    body_of,
    fault_of,
    in_requests,
    may_pass,
    outcome_of,
)
from scorekit.retrieval.wire import REVISION_HEADER, IndexInfo, Page

_WHAT = "page retriever"
_PNG = b"\x89PNG\r\n\x1a\n"
#: Bytes of all pictures that a client keeps.
_KEPT_BYTES = 256 * 2**20


class Retriever:
    """The client of one retriever, for code that is not async; threads may share it. In a forked
    child it makes its connections anew.

    url: of the service. api_key: default from SCOREKIT_API_KEY. timeout_s: seconds for one request.
    deadline_s: for one request with its second tries (no connection, 429, 502, 503, 504, searches
    that failed for the moment) and the pauses between them. max_in_flight: requests at once. Raises
    UserError for what is no http URL.

    What every call may raise: ServiceUnreachable without an answer until the deadline, or with one
    that is none; IndexChanged where another index answers than before; RequestError where the
    request is refused; UserError where another service answers.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
        max_in_flight: int = 8,
    ) -> None:
        base, key, seen = checked_url(url), own_key(api_key), _Seen()

        def make() -> _Client:
            return _Client(base, key, timeout_s, deadline_s, max_in_flight, seen)

        self.url = base
        self._own = OwnLoop("retriever's client", make, _Client.close)

    def info(self) -> IndexInfo:
        """Which index answers now; asked anew each time, so that a run can look."""
        return self._own.run(lambda client: client.info())

    def search(
        self,
        queries: Sequence[str],
        top_k: int = 10,
        exclude: Sequence[Sequence[str]] | None = None,
    ) -> list[Found]:
        """What each query found, in order; nothing found is an empty list. Equal searches are asked
        once, and they go out in as few requests as the service allows.

        exclude: of each query, ids of pages that it is not to find. A query that cannot be asked
        (empty, NUL, not Unicode), or that fails alone, has a SampleError in its place.
        """
        excluded = exclude if exclude is not None else [()] * len(queries)
        searches = [
            (query, tuple(dict.fromkeys(pages)))
            for query, pages in zip(queries, excluded, strict=True)
        ]
        return self._own.run(lambda client: client.search(searches, top_k))

    def page(self, page_id: str) -> Page:
        """Size and text of a page. Raises RequestError (`not_found`) where there is none."""
        return self._own.run(lambda client: client.page(page_id))

    def image(self, page_id: str) -> bytes:
        """The page's picture, a PNG; the ones asked for last are kept. Raises RequestError
        (`not_found`) where there is no such page."""
        return self._own.run(lambda client: client.image(page_id))

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        self._own.close()

    def __enter__(self) -> Retriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Seen:
    """The revision that answered first. A forked child knows its parent's."""

    revision: str | None = None


class _Client:
    """What `Retriever` does, on its event loop."""

    def __init__(
        self,
        base: str,
        key: str | None,
        timeout_s: float,
        deadline_s: float,
        max_in_flight: int,
        seen: _Seen,
    ) -> None:
        self._base = base
        self._timeout_s = timeout_s
        self._seen = seen
        self._limits: SearchLimits | None = None
        self._asking = asyncio.Lock()
        self._pictures = KeptPictures(self._fetch_image, _KEPT_BYTES)
        self._server = OneServer(
            base,
            key,
            _WHAT,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_in_flight=max_in_flight,
        )

    async def close(self) -> None:
        await self._server.close()

    async def info(self) -> IndexInfo:
        told = await self._json("/v1/info")
        try:
            found = IndexInfo.model_validate(told)
            self._limits = SearchLimits.model_validate(told)
        except ValidationError:
            name = told.get("service") if isinstance(told, dict) else None
            who = f"the service {name[:40]!r}" if isinstance(name, str) else "another service"
            raise UserError(f"{self._base} is {who}, not a {_WHAT}: give its URL") from None
        self._check_revision(found.revision)
        return found

    def _check_revision(self, revision: str) -> None:
        self._seen.revision = self._seen.revision or revision
        if revision != self._seen.revision:
            raise IndexChanged(self._base, self._seen.revision, revision)

    # -- searches ---------------------------------------------------------------------------------

    async def search(self, searches: list[Search], top_k: int) -> list[Found]:
        found: dict[Search, Found | None] = {one: fault_of(one) for one in searches}
        wanted = [one for one, fault in found.items() if fault is None]
        if wanted:
            parts = in_requests(wanted, await self._known_limits())
            tasks = [asyncio.create_task(self._answers(part, top_k)) for part in parts]
            try:
                for part, answers in zip(parts, await asyncio.gather(*tasks), strict=True):
                    found.update(zip(part, answers, strict=True))
            finally:
                for task in tasks:
                    task.cancel()
        outcomes = [found[one] for one in searches]
        return [[*one] if isinstance(one, list) else one for one in outcomes]  # type: ignore[misc]

    async def _known_limits(self) -> SearchLimits:
        async with self._asking:
            if self._limits is None:
                await self.info()
        assert self._limits is not None
        return self._limits

    async def _answers(self, searches: list[Search], top_k: int) -> list[Found]:
        """Of one request, and of what it is cut into where a proxy has a smaller limit."""
        try:
            async with self._server.slots:
                deadline = self._server.deadline()
                with self._server.absence.watched(deadline):
                    return await self._tried(searches, top_k, deadline)
        except RequestError as error:
            if error.type != "too_large":
                raise
        if len(searches) == 1:
            return [SampleError("invalid_input", "the query is too long for the service")]
        half = (len(searches) + 1) // 2
        first = await self._answers(searches[:half], top_k)
        return first + await self._answers(searches[half:], top_k)

    async def _tried(self, searches: list[Search], top_k: int, deadline: Deadline) -> list[Found]:
        """Searches that failed for the moment are asked again until the deadline, and have failed
        then."""
        found: dict[Search, Found] = {}
        missing = searches
        try:
            async for attempt in self._server.tries(deadline):
                with attempt:
                    found.update(await self._searched(missing, top_k, deadline))
                    missing = [one for one in missing if may_pass(found[one])]
                    if missing:
                        raise RequestError("unavailable", f"{self._base}: searches failed for now")
                    self._server.absence.answered()
        except (ServiceUnreachable, RequestError) as error:
            if not is_retryable(error) or any(one not in found for one in missing):
                raise
        return [found[one] for one in searches]

    async def _searched(
        self, searches: list[Search], top_k: int, deadline: Deadline
    ) -> dict[Search, Found]:
        body = to_json(
            {
                "queries": [body_of(one) for one in searches],
                "top_k": top_k,
                "timeout_s": deadline.for_service(self._timeout_s),
            }
        )
        response = self._accepted(await self._server.once("POST", "/v1/search", deadline, body))
        with understood(self._base, _WHAT):
            answer = SearchAnswer.model_validate_json(response.content)
            self._check_revision(answer.index.revision)
            pairs = zip(searches, answer.results, strict=True)
            return {one: outcome_of(result, top_k) for one, result in pairs}

    # -- pages ------------------------------------------------------------------------------------

    async def page(self, page_id: str) -> Page:
        told = await self._json(_path_of(page_id))
        with understood(self._base, _WHAT):
            page = Page.model_validate(told)
        if page.page_id != page_id:
            raise ServiceUnreachable(self._base, "it tells of another page", retryable=False)
        return page

    async def image(self, page_id: str) -> bytes:
        return await self._pictures.get(page_id)

    async def _fetch_image(self, page_id: str) -> bytes:
        path = f"{_path_of(page_id)}/image?format=png"
        picture = (await self._got(path)).content
        if not picture.startswith(_PNG):
            raise ServiceUnreachable(self._base, "a picture that is no PNG", retryable=False)
        return picture

    # -- requests ---------------------------------------------------------------------------------

    async def _json(self, path: str) -> Any:
        response = await self._got(path)
        with understood(self._base, _WHAT):
            return from_json(response.content)

    async def _got(self, path: str) -> httpx.Response:
        """The answer to a GET, with second tries."""
        return await self._server.asked("GET", path, read=self._accepted)

    def _accepted(self, response: httpx.Response) -> httpx.Response:
        """Raises the typed error of a refusal, IndexChanged."""
        if response.status_code != 200:
            raise_refusal(self._base, response, _WHAT)
        if revision := response.headers.get(REVISION_HEADER):
            self._check_revision(revision)
        return response


def _path_of(page_id: str) -> str:
    """One segment, whatever the id: no dot of it makes the path another one. A slash would, also
    when it is quoted, and no page has one."""
    if not page_id or "/" in page_id:
        raise RequestError("not_found", "an empty text, or one with a slash, is no page's id")
    segment = quote(page_id, safe="", errors="surrogatepass").replace(".", "%2E")
    return f"/v1/pages/{segment}"
