"""A retriever whose failures end single episodes, and not the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from scorekit.errors import (
    IndexChanged,
    RequestError,
    SampleError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.retrieval.wire import IndexInfo, Page, PageHit
from trainer.search.reward import TICK_S, WaitAborted
from trainer.search.rollout.tools import MAX_TOOL_CALLS, PageSource

T = TypeVar("T")


class WatchedRetriever:
    """A retriever whose errors fail single episodes, while the others go on.

    should_stop: ends the calls that wait, and then the run. tolerates_outage: `error` does not
    count calls without an answer. error: of any thread, to be raised when the episodes have ended.
    It is not raised here: only one of several processes may have it, and the others would wait.
    """

    def __init__(
        self, pages: PageSource, should_stop: Callable[[], bool], tolerates_outage: bool
    ) -> None:
        self._pages, self._should_stop = pages, should_stop
        self._tolerates_outage = tolerates_outage
        self._info = pages.info()
        self._threads = ThreadPoolExecutor(MAX_TOOL_CALLS, thread_name_prefix="retriever")
        self._answered_at = self._away_at = float("-inf")
        self.error: ScorekitError | WaitAborted | None = None

    def info(self) -> IndexInfo:
        """Return the description of the index when this object was made."""
        return self._info

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[list[PageHit] | SampleError]:
        """Return the hits, or an error, of each query."""
        try:
            return self._wait_for(lambda: self._pages.search(queries, top_k))
        except RequestError as error:
            if not self._tolerates_outage:
                self.error = self.error or error
            return [SampleError("upstream", str(error))] * len(queries)

    def page(self, page_id: str) -> Page:
        """Return the size and the text of a page. Raises RequestError."""
        return self._wait_for(lambda: self._pages.page(page_id))

    def image(self, page_id: str) -> bytes:
        """Return the image file of a page. Raises RequestError."""
        return self._wait_for(lambda: self._pages.image(page_id))

    def close(self) -> None:
        """Cancel the calls that have not started. A call that runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait_for(self, call: Callable[[], T]) -> T:
        """Return the result of a call. Raises RequestError if there is none.

        If a call ends without an answer, and the retriever answered no other call since that one
        began, it is away: then the calls that wait end, too, and not each at its own deadline.
        """
        started_at = time.monotonic()
        future = self._threads.submit(call)
        while not wait([future], TICK_S).done:
            if self._should_stop():
                self.error = self.error or WaitAborted()
                raise RequestError("unavailable", "the run is stopping")
            if self._away_at > max(started_at, self._answered_at):
                future.cancel()
                raise RequestError("unavailable", "the retriever is away")
        try:
            result = future.result()
        except ScorekitError as error:
            if isinstance(error, ServiceUnreachable) and self._answered_at < started_at:
                self._away_at = time.monotonic()
            raise self._record(error) from None
        self._answered_at = time.monotonic()
        return result

    def _record(self, error: ScorekitError) -> RequestError:
        """Return the error that fails the episode; note one that ends the run."""
        ends_run = isinstance(error, (IndexChanged, UserError))
        if ends_run or (isinstance(error, ServiceUnreachable) and not self._tolerates_outage):
            self.error = self.error or error
        if isinstance(error, RequestError):
            return error
        return RequestError("unavailable", str(error))
