"""The verb of the retriever: queries in, the pages that answer each best out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationError
from pydantic_core import from_json, to_json

from scorekit.errors import RequestError, SampleError
from scorekit.retrieval.wire import IndexInfo, PageHit
from scorekit.schemas import Failed, ModelRef, Priority, Wire, WireAnswer, whole
from scorekit.server.description import Description
from scorekit.server.http.answers import PART, result_json
from scorekit.server.http.checks import fault_in
from scorekit.server.verb import Answer, Asked, Verb
from services.retriever.backends.ranking import Ranking
from services.retriever.index.records import PageRecord

#: Most hits of a query, and most pages that a query can leave out.
MOST_HITS, MOST_EXCLUDED = 1000, 10_000
#: Of all queries of a request together.
MOST_HITS_TOGETHER, MOST_EXCLUDED_TOGETHER = 100_000, 1_000_000
#: Answers of more hits are not kept: the cache counts answers, whatever their size.
_KEPT_HITS = 100


class FoundPages(WireAnswer):
    """A query that was answered. hits: the best first; none where nothing was found."""

    id: str | None
    ok: Literal[True]
    cached: bool
    hits: list[PageHit]


class IndexRef(WireAnswer):
    """Which index answered."""

    id: str
    revision: str
    pages: int


class SearchResponse(WireAnswer):
    """The answer to `POST /v1/search`: result k answers query k."""

    index: IndexRef
    results: list[Annotated[FoundPages | Failed, Field(discriminator="ok")]]


class RetrieverInfo(IndexInfo):
    """The retriever's answer to `GET /v1/info`."""

    service: str
    max_samples: int = Field(description="Most queries in one request.")
    max_body_bytes: int = Field(description="Largest request body in bytes.")
    max_query_chars: int = Field(description="Most characters of a query.")
    textless: int = Field(description="Pages without any text.")
    skipped: int = Field(description="Files and pages that could not be read.")
    settings: dict[str, dict[str, Any]] = Field(description="Of each back end that is asked.")
    versions: dict[str, str | None] = Field(description="scorekit, bm25s, kiwipiepy.")
    commit: str | None = Field(description="Git commit of the running code, where it is known.")


class Query(Wire):
    """What is looked for. exclude: ids of pages that are no hits of it; an unknown one is none."""

    id: str | None = Field(None, description="The caller's name for the query; echoed.")
    query: str = Field(min_length=1, description="What is looked for, in words.")
    exclude: list[str] = Field(
        default_factory=list, max_length=MOST_EXCLUDED, description="Pages that are left out."
    )


class SearchOptions(NamedTuple):
    """How the queries of a request are answered."""

    top_k: int


@dataclass(slots=True, kw_only=True)
class RetrieverDescription(Description):
    """What a loaded index says of itself. numbers: page id -> index. hit: of a page, by its index,
    its rank and its score."""

    index: IndexInfo
    textless: int
    skipped: int
    settings: dict[str, dict[str, Any]]
    max_query_chars: int
    numbers: dict[str, int] = field(default_factory=dict)


class PageSearch(Verb):
    """`POST /v1/search`. The backend's description is a `RetrieverDescription`; its outcomes hold
    a `ranking` of `pages`."""

    path = "/v1/search"
    about = "Find pages; result k answers query k. A bad query fails beside its siblings."
    name, done = "search", "searched"
    field, items = "queries", "queries"
    page = "retriever"
    response_type: type[BaseModel] = SearchResponse
    info_type = RetrieverInfo

    def __init__(
        self,
        routes: Callable[[FastAPI], None] = lambda app: None,
        faces: Sequence[Verb] = (),
    ) -> None:
        self._routes = routes
        self.pages: list[bytes] = []  # as `hit_of` has them; set when the index is loaded
        self.faces = faces

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Queries, how many hits of each, and what is left out for all."""

        class SearchRequest(Wire):
            queries: Annotated[list[Query], FailFast()] = Field(min_length=1, max_length=max_items)
            top_k: Annotated[int, BeforeValidator(whole)] = Field(
                10, ge=1, le=MOST_HITS, description="Most hits of a query."
            )
            exclude: list[str] = Field(
                default_factory=list,
                max_length=MOST_EXCLUDED,
                description="Pages that are left out for every query.",
            )
            cache: bool = Field(True, description="Take known answers, and keep new ones.")
            priority: Priority = Field(
                "interactive", description="`interactive` is searched before `bulk`."
            )
            timeout_s: float | None = Field(
                None, gt=0, le=86400, description="Seconds until an answer; null: the service's."
            )

        return SearchRequest

    def read(self, request: Any, told: Description) -> Asked:
        """What is left out for all is left out for each. Raises RequestError where it is too
        much together."""
        queries = request.queries
        if len(queries) * len(request.exclude) > MOST_EXCLUDED_TOGETHER:
            most = f"{MOST_EXCLUDED_TOGETHER:,}"
            raise RequestError("too_large", f"exclude: times the queries more than {most}")
        if request.exclude:
            queries = [
                query.model_copy(update={"exclude": [*query.exclude, *request.exclude]})
                for query in queries
            ]
        return asked(queries, request.top_k, request.cache, request.priority, request.timeout_s)

    def plain_options(self, told: Description) -> SearchOptions:
        """Ten hits."""
        return SearchOptions(10)

    def item_fault(self, item: Query, max_chars: int) -> SampleError | None:
        """A query that is too long, or that nothing should read."""
        fault = fault_in(item.query, max_chars)
        if fault is None and not item.query.strip():
            fault = "nothing but blanks"
        return SampleError("invalid_input", f"query: {fault}") if fault else None

    def content(self, item: Query) -> Any:
        """The query, and what is left out, in whatever order."""
        return [item.query, sorted(set(item.exclude))]

    def outcome_fault(self, fields: dict[str, Any]) -> SampleError | None:
        """None: scores that are not finite are no hits."""
        return None

    def write(self, fields: dict[str, Any]) -> bytes:
        """Its hits. A page's own part of one is written once, when the index is loaded: written
        for each query anew it costs as much as the search."""
        ranking: Ranking = fields["ranking"]
        if not all(math.isfinite(score) for _, score in ranking):
            raise ValueError("a score that is not finite")
        hits = [
            b'%b,"rank":%d,"score":%b}' % (self.pages[number], rank, repr(score).encode())
            for rank, (number, score) in enumerate(ranking, 1)
        ]
        return b'{"hits":[' + b",".join(hits) + b"]}"

    def fits(self, value: bytes, item: Query, options: SearchOptions, told: Description) -> bool:
        """Hits of pages of this index, no more than asked for, in their order, none left out."""
        assert isinstance(told, RetrieverDescription)
        try:
            stored = _Stored.model_validate_json(value)
        except ValidationError:
            return False
        hits, out = stored.hits, set(item.exclude)
        scores = [hit.score for hit in hits]
        return (
            len(hits) <= options.top_k
            and [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
            and scores == sorted(scores, reverse=True)
            and all(hit.page_id in told.numbers and hit.page_id not in out for hit in hits)
            and all(hit.image == image_path(hit.page_id) for hit in hits)
        )

    def answer(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Failed queries stand beside good ones."""
        parts = [b'{"index":' + to_json(self.index) + b',"results":[']
        size = 0
        for index, (query, answer) in enumerate(zip(request.queries, answers, strict=True)):
            result = result_json(query.id, answer, index in cached)
            parts += [b",", result] if index else [result]
            size += len(parts[-1])
            if size > PART:
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join([*parts, b"]}"])

    def add_routes(self, app: FastAPI) -> None:
        """Pages and their pictures."""
        self._routes(app)

    def info(self, common: dict[str, Any], told: Description) -> RetrieverInfo:
        """Which index, and how it is searched."""
        assert isinstance(told, RetrieverDescription)
        shown = {
            name: value for name, value in common.items() if name in RetrieverInfo.model_fields
        }
        return RetrieverInfo(
            **shown | told.index.model_dump(),
            textless=told.textless,
            skipped=told.skipped,
            settings=told.settings,
            max_query_chars=told.max_query_chars,
        )

    @property
    def index(self) -> IndexRef:
        """Of the answers; set when the index is loaded."""
        return self._index

    @index.setter
    def index(self, index: IndexRef) -> None:
        self._index = index


class _Stored(WireAnswer):
    hits: list[PageHit]


def asked(
    queries: Sequence[Query],
    top_k: int,
    cache: bool = True,
    priority: Priority = "interactive",
    timeout_s: float | None = None,
) -> Asked:
    """What any face of the verb asks of the queue. Raises RequestError for too many hits."""
    if len(queries) * top_k > MOST_HITS_TOGETHER:
        most = f"{MOST_HITS_TOGETHER:,}"
        raise RequestError("too_large", f"hits: times the queries more than {most}")
    cache = cache and top_k <= _KEPT_HITS
    return Asked(queries, SearchOptions(top_k), [top_k], cache, priority, timeout_s)


def hits_of(answer: bytes) -> list[dict[str, Any]]:
    """The hits of a good outcome, as it was written."""
    hits: list[dict[str, Any]] = from_json(answer)["hits"]
    return hits


def hit_of(page: PageRecord) -> bytes:
    """What a hit says of the page: the JSON object, open for rank and score."""
    told = {
        "page_id": page.page_id,
        "document": page.document,
        "page": page.page,
        "width": page.width,
        "height": page.height,
        "image": image_path(page.page_id),
    }
    return to_json(told).removesuffix(b"}")


def image_path(page_id: str) -> str:
    """Path of a page's picture on the service."""
    return f"/v1/pages/{quote(page_id, safe='')}/image"
