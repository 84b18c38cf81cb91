"""What actions come to: the searches of a round in one request, crops, and corrections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeAlias

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, SampleError
from scorekit.retrieval.wire import IndexInfo, Page, PageHit
from trainer.search.actions import Crop, Invalid, Search
from trainer.search.records import View
from trainer.search.sight.legible import legible_lines
from trainer.search.sight.pictures import PictureError
from trainer.search.sight.views import NotCropped, Shown, crop_view, page_view
from trainer.search.turns import prompt
from trainer.search.turns.config import EpisodeConfig

#: Pages as shown that are kept: those of a few hundred episodes of some documents.
_KEPT = 512


class Pages(Protocol):
    """A retriever: `scorekit.retrieval.client.Retriever`, or what stands in for it."""

    def info(self) -> IndexInfo:
        """Which index answers."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[list[PageHit] | SampleError]:
        """What each query found."""
        ...

    def page(self, page_id: str) -> Page:
        """Size and text of a page."""
        ...

    def image(self, page_id: str) -> bytes:
        """Its picture."""
        ...


@dataclass(frozen=True, slots=True)
class Acted:
    """An action that does not end its episode. last: the view that was shown last. seen: ids of the
    pages shown before. left: turns that come behind this one."""

    action: Search | Crop | Invalid
    last: View | None
    seen: frozenset[str]
    left: int


@dataclass(slots=True)
class ToolResult:
    """text: of the observation. shown: with it. reason, detail: of an action that was none, or was
    refused. failed: why a neighbour gave nothing."""

    text: str = ""
    shown: list[Shown] = field(default_factory=list)
    hits: list[PageHit] = field(default_factory=list)
    rank: int | None = None
    reason: str | None = None
    detail: str = ""
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A picture, and in text mode its lines."""

    shown: Shown
    lines: tuple[str, ...]


_Got: TypeAlias = "_Seen | NotCropped | str"  # a str: what failed


class Tools:
    """Of one retriever. keep_picture: is given each picture, by its hash, before anything refers to
    it. Pages as shown are kept from call to call."""

    def __init__(
        self,
        pages: Pages,
        cfg: EpisodeConfig,
        keep_picture: Callable[[str, bytes], None],
    ) -> None:
        self._pages, self._cfg = pages, cfg
        self._keep_picture = keep_picture
        self._kept: set[str] = set()
        self._shown = lru_cache(_KEPT)(self._show)
        self._page = lru_cache(_KEPT)(pages.page)

    def apply(self, acted: Sequence[Acted], pool: Executor) -> list[ToolResult]:
        """What each action came to, in order. pool: where pictures are got and made. Raises what
        the retriever does where it is away."""
        outcomes = [ToolResult() for _ in acted]
        searches = [i for i, one in enumerate(acted) if isinstance(one.action, Search)]
        crops = [i for i, one in enumerate(acted) if isinstance(one.action, Crop)]
        for i, one in enumerate(acted):
            if isinstance(one.action, Invalid):
                self._refuse(outcomes[i], one, one.action.reason, one.action.detail)
        self._search(searches, acted, outcomes, pool)
        cut = pool.map(lambda i: self._cut(acted[i]), crops)
        for i, got in zip(crops, cut, strict=True):
            self._tell_crop(outcomes[i], acted[i], got)
        return outcomes

    def _search(
        self,
        places: list[int],
        acted: Sequence[Acted],
        outcomes: list[ToolResult],
        pool: Executor,
    ) -> None:
        queries = [one.action.query for i in places if isinstance((one := acted[i]).action, Search)]
        found = self._pages.search(queries, top_k=self._cfg.top_k) if queries else []
        fresh: dict[int, list[PageHit]] = {}
        for i, answer in zip(places, found, strict=True):
            if isinstance(answer, SampleError):
                self._tell_refusal(outcomes[i], acted[i], answer)
                continue
            outcomes[i].hits = list(answer)
            unseen = {hit.page_id: hit for hit in reversed(answer)}
            new = [hit for hit in answer if unseen[hit.page_id] is hit]
            new = [hit for hit in new if hit.page_id not in acted[i].seen]
            fresh[i] = new[: self._cfg.pages_per_search]
        wanted = list(dict.fromkeys(hit.page_id for hits in fresh.values() for hit in hits))
        got = dict(zip(wanted, pool.map(self._try_page, wanted), strict=True))
        for i, hits in fresh.items():
            self._tell_pages(outcomes[i], acted[i], hits, got)

    def _tell_pages(
        self, outcome: ToolResult, one: Acted, hits: list[PageHit], got: dict[str, _Seen | str]
    ) -> None:
        lines = []
        for hit in hits:
            page = got[hit.page_id]
            if isinstance(page, str):
                outcome.failed = page
                return
            self._keep(outcome, page)
            of = len(outcome.hits)
            lines += [prompt.page_line(page.shown.view, hit.rank, of, self._cfg), *page.lines]
        if not hits:
            lines = [prompt.nothing_found(len(outcome.hits))]
        outcome.rank = hits[0].rank if hits else None
        outcome.text = self._text(lines, one)

    def _tell_refusal(self, outcome: ToolResult, one: Acted, error: SampleError) -> None:
        if error.type in TEXT_ERROR_TYPES:
            self._refuse(outcome, one, "query_refused", "the search takes no such query")
        else:
            outcome.failed = f"retriever: {error.type}"

    def _tell_crop(self, outcome: ToolResult, one: Acted, got: _Got) -> None:
        if isinstance(got, str):
            outcome.failed = got
        elif isinstance(got, NotCropped):
            self._refuse(outcome, one, got.reason, got.detail)
        else:
            self._keep(outcome, got)
            lines = [prompt.crop_line(got.shown.view, self._cfg), *got.lines]
            outcome.text = self._text(lines, one)

    def _refuse(self, outcome: ToolResult, one: Acted, reason: str, detail: str) -> None:
        box = isinstance(one.action, Crop) or reason == "box_form"
        outcome.reason, outcome.detail = reason, detail
        told = prompt.correction(detail, one.last, self._cfg.sight, box=box)
        outcome.text = self._text([told], one)

    def _text(self, lines: Sequence[str], one: Acted) -> str:
        return "\n".join(line for line in (*lines, prompt.turns_left(one.left, self._cfg)) if line)

    def _keep(self, outcome: ToolResult, seen: _Seen) -> None:
        name = seen.shown.view.image
        if name not in self._kept:
            self._keep_picture(name, seen.shown.png)
            self._kept.add(name)
        outcome.shown.append(seen.shown)

    # -- in the pool ------------------------------------------------------------------------------

    def _try_page(self, page_id: str) -> _Seen | str:
        try:
            return self._shown(page_id)
        except (RequestError, PictureError) as error:
            return _failure(error)

    def _show(self, page_id: str) -> _Seen:
        shown = page_view(page_id, self._pages.image(page_id), self._cfg.sight)
        return _Seen(shown, self._lines(shown.view))

    def _cut(self, one: Acted) -> _Got:
        assert isinstance(one.action, Crop)
        if one.last is None:
            return NotCropped("no_picture", "there is no picture to take a part of")
        try:
            image = self._pages.image(one.last.page_id)
            shown = crop_view(one.last, one.action.box, image, self._cfg.sight)
            if isinstance(shown, NotCropped):
                return shown
            return _Seen(shown, self._lines(shown.view))
        except (RequestError, PictureError) as error:
            return _failure(error)

    def _lines(self, view: View) -> tuple[str, ...]:
        if self._cfg.observation == "image":
            return ()
        return tuple(legible_lines(self._page(view.page_id), view, self._cfg.sight))


def _failure(error: RequestError | PictureError) -> str:
    kind = error.type if isinstance(error, RequestError) else str(error)
    return f"retriever: {kind}"
