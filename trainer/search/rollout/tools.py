"""Execute the action of a turn: a search, a crop, or the correction of a mistake.

`SearchTools` gets pages of any retriever. `WatchedRetriever` is one whose failures end single
episodes, and not the run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, TypeAlias, TypeVar

from scorekit.errors import (
    TEXT_ERROR_TYPES,
    IndexChanged,
    RequestError,
    SampleError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.retrieval.wire import IndexInfo, Page, PageHit
from trainer.search.config import EpisodeConfig
from trainer.search.images.image_data import ImageError
from trainer.search.images.views import CropFailure, ShownImage, crop_view, legible_lines, page_view
from trainer.search.records import ImageView
from trainer.search.reward import TICK_S, WaitAborted
from trainer.search.rollout import prompt
from trainer.search.rollout.actions import Crop, Invalid, Search

T = TypeVar("T")
#: Cache size in page images: enough for a few hundred episodes on some documents.
_CACHE_SIZE = 512
#: Pages and crops that are rendered at the same time. More threads than processors would only delay
#: the threads that send and receive.
_RENDERED_AT_ONCE = min(8, os.cpu_count() or 1)

#: Max tool calls of a process that wait for the retriever at the same time. The retriever's client
#: has a lower bound of its own (`retriever.max_in_flight`): a thread only waits.
MAX_TOOL_CALLS = 256


class PageSource(Protocol):
    """A retriever: `scorekit.retrieval.client.Retriever`, or a substitute."""

    def info(self) -> IndexInfo:
        """Return the description of the index."""

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[list[PageHit] | SampleError]:
        """Return the hits, or an error, of each query."""

    def page(self, page_id: str) -> Page:
        """Return the size and the text of a page."""

    def image(self, page_id: str) -> bytes:
        """Return the image file of a page."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An action that does not end its episode.

    last: the last view.
    seen: ids of the pages in earlier views.
    left: number of turns after this one.
    """

    action: Search | Crop | Invalid
    last: ImageView | None
    seen: frozenset[str]
    left: int


@dataclass(slots=True)
class ToolResult:
    """The observation of an action.

    images: its images.
    rank: that of the first page shown among the hits.
    reason, detail: of an invalid or refused action.
    failed: the reason if a service gave no result.
    """

    text: str = ""
    images: list[ShownImage] = field(default_factory=list)
    hits: list[PageHit] = field(default_factory=list)
    rank: int | None = None
    reason: str | None = None
    detail: str = ""
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class _RenderedImage:
    """An image and, in text mode, its lines."""

    image: ShownImage
    lines: tuple[str, ...]


_ImageResult: TypeAlias = "_RenderedImage | CropFailure | str"  # a str: the failure


class SearchTools:
    """The tools of one retriever. Threads may share them.

    Rendered pages are cached between calls. A page is fetched and rendered once for all that wait
    for it; an error goes to all of them and is not cached.

    save_image: is called with the hash and the PNG of each image before a record refers to it.
    form: how the policy writes its actions, which the corrections of its mistakes name.
    original_pixels: max area of the originals, which are for the generator and are saved with the
        images; None: there are none.
    """

    def __init__(
        self,
        pages: PageSource,
        cfg: EpisodeConfig,
        save_image: Callable[[str, bytes], None],
        original_pixels: int | None = None,
        form: prompt.ActionForm = "tags",
    ) -> None:
        self._pages, self._cfg, self.form = pages, cfg, form
        self._save_image, self._original_pixels = save_image, original_pixels
        self._stored: set[str] = set()
        #: Hash -> PNG. The cache of views would hold these large images for the whole run.
        self._unsaved_originals: dict[str, bytes] = {}
        self._cached_view = lru_cache(_CACHE_SIZE)(self._show)
        self._page = lru_cache(_CACHE_SIZE)(pages.page)
        self._pending_views: dict[str, Future[_RenderedImage]] = {}
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._rendering = threading.BoundedSemaphore(_RENDERED_AT_ONCE)

    def index_revision(self) -> str:
        """Return the revision of the index that answers now. Raises what the retriever raises."""
        return self._pages.info().revision

    def execute(self, call: ToolCall) -> ToolResult:
        """Return the result of an action; `save_images` comes before a record refers to it.

        Raises what the retriever raises if it is unavailable.
        """
        result = ToolResult()
        if isinstance(call.action, Search):
            self._search(call, call.action.query, result)
        elif isinstance(call.action, Crop):
            self._add_crop(result, call, self._cut(call))
        else:
            self._refuse(result, call, call.action.reason, call.action.detail)
        return result

    def save_images(self, result: ToolResult) -> None:
        """Save the images of a result that are not saved yet.

        When it returns, all of them are saved, also those that another thread has begun to save.
        """
        with self._saving:
            for image in result.images:
                original = image.view.original or ""
                original_image = self._unsaved_originals.get(original)
                for name, png in ((image.view.image, image.png), (original, original_image)):
                    if png is not None and name not in self._stored:
                        self._save_image(name, png)
                        self._stored.add(name)
                self._unsaved_originals.pop(original, None)

    def _search(self, call: ToolCall, query: str, result: ToolResult) -> None:
        """Search, and show the first hits that the episode has not seen."""
        (answer,) = self._pages.search([query], top_k=self._cfg.top_k)
        if isinstance(answer, SampleError):
            if answer.type in TEXT_ERROR_TYPES:
                self._refuse(result, call, "query_refused", "the search takes no such query")
            else:
                result.failed = f"retriever: {answer.type}"
            return
        result.hits = list(answer)
        first = {hit.page_id: hit for hit in reversed(answer)}
        new = [hit for hit in answer if first[hit.page_id] is hit and hit.page_id not in call.seen]
        self._add_pages(result, call, new[: self._cfg.pages_per_search])

    def _add_pages(self, outcome: ToolResult, call: ToolCall, hits: list[PageHit]) -> None:
        lines = []
        for hit in hits:
            page = self._try_page(hit.page_id)
            if isinstance(page, str):
                outcome.failed = page
                return
            outcome.images.append(page.image)
            num_hits = len(outcome.hits)
            lines += [prompt.page_line(page.image.view, hit.rank, num_hits, self._cfg), *page.lines]
        if not hits:
            lines = [prompt.nothing_found(len(outcome.hits))]
        outcome.rank = hits[0].rank if hits else None
        outcome.text = self._text(lines, call)

    def _add_crop(self, outcome: ToolResult, call: ToolCall, view: _ImageResult) -> None:
        if isinstance(view, str):
            outcome.failed = view
        elif isinstance(view, CropFailure):
            self._refuse(outcome, call, view.reason, view.detail)
        else:
            outcome.images.append(view.image)
            lines = [prompt.crop_line(view.image.view, self._cfg), *view.lines]
            outcome.text = self._text(lines, call)

    def _refuse(self, outcome: ToolResult, call: ToolCall, reason: str, detail: str) -> None:
        box = isinstance(call.action, Crop) or reason == "box_form"
        outcome.reason, outcome.detail = reason, detail
        text = prompt.correction(detail, call.last, self._cfg.sight, box=box, form=self.form)
        outcome.text = self._text([text], call)

    def _text(self, lines: Sequence[str], call: ToolCall) -> str:
        return "\n".join(line for line in (*lines, prompt.turns_left(call.left, self._cfg)) if line)

    def _try_page(self, page_id: str) -> _RenderedImage | str:
        with self._lock:
            pending, is_first = self._pending_views.get(page_id), False
            if pending is None:
                pending, is_first = Future(), True
                self._pending_views[page_id] = pending
        if is_first:
            try:
                pending.set_result(self._cached_view(page_id))
            except BaseException as error:
                pending.set_exception(error)
            with self._lock:
                del self._pending_views[page_id]
        try:
            return pending.result()
        except (RequestError, ImageError) as error:
            return _failure(error)

    def _show(self, page_id: str) -> _RenderedImage:
        image = self._pages.image(page_id)
        with self._rendering:
            page = page_view(page_id, image, self._cfg.sight, self._original_pixels)
        return self._render(page)

    def _cut(self, call: ToolCall) -> _ImageResult:
        assert isinstance(call.action, Crop)
        if call.last is None:
            return CropFailure("no_picture", "there is no picture to take a part of")
        try:
            image = self._pages.image(call.last.page_id)
            with self._rendering:
                crop = crop_view(
                    call.last, call.action.box, image, self._cfg.sight, self._original_pixels
                )
            return crop if isinstance(crop, CropFailure) else self._render(crop)
        except (RequestError, ImageError) as error:
            return _failure(error)

    def _render(self, image: ShownImage) -> _RenderedImage:
        original = image.view.original
        if image.original is not None and original is not None:
            if original not in self._stored:
                self._unsaved_originals[original] = image.original
            image = replace(image, original=None)
        return _RenderedImage(image, self._lines(image.view))

    def _lines(self, view: ImageView) -> tuple[str, ...]:
        if self._cfg.observation == "image":
            return ()
        return tuple(legible_lines(self._page(view.page_id), view, self._cfg.sight))


def _failure(error: RequestError | ImageError) -> str:
    kind = error.type if isinstance(error, RequestError) else str(error)
    return f"retriever: {kind}"


class WatchedRetriever:
    """A retriever whose errors fail single episodes, while the others go on.

    should_stop: ends the calls that wait, and then the run.
    tolerates_outage: `error` does not count calls without an answer.
    error: of any thread, to be raised when the episodes have ended. It is not raised here: only one
        of several processes may have it, and the others would wait.
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
