"""The search endpoints: they take queries and return the best pages for each.

Two are in the formats of other servers, for their existing clients: Search-R1's `POST /retrieve`
(also used by SkyRL and verl) and VRAG's `GET /search`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import quote

from fastapi import FastAPI
from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    RootModel,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json, to_json

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, SampleError
from scorekit.retrieval.wire import IndexInfo, PageHit
from scorekit.schemas import Failed, ModelRef, Priority, Wire, WireAnswer, as_integer
from scorekit.server.endpoint import (
    Answer,
    Endpoint,
    ModelDescription,
    ParsedRequest,
    find_text_problem,
    list_in_parts,
    results_json,
)
from services.retriever.backends.ranking import Ranking
from services.retriever.index.records import PageRecord

#: Largest number of hits, and of excluded pages, of a query.
MOST_HITS, MOST_EXCLUDED = 1000, 10_000
#: The same limits summed over all queries of a request.
MOST_HITS_TOGETHER, MOST_EXCLUDED_TOGETHER = 100_000, 1_000_000
#: Answers with more hits are not cached: the cache counts answers, not bytes.
_MAX_CACHED_HITS = 100
#: Default number of hits, as on the servers of Search-R1 and VRAG.
_RETRIEVED, _SEARCHED = 3, 10
_LATE = SampleError("timeout", "not searched in time")


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
    """Options for all queries of a request."""

    top_k: int


@dataclass(slots=True, kw_only=True)
class RetrieverDescription(ModelDescription):
    """Describes a loaded index.

    numbers: page id -> index of the page.
    """

    index: IndexInfo
    textless: int
    skipped: int
    settings: dict[str, dict[str, Any]]
    max_query_chars: int
    numbers: dict[str, int] = field(default_factory=dict)


class SearchEndpoint(Endpoint):
    """`POST /v1/search`. The backend's description is a `RetrieverDescription`; its outcomes hold
    a `ranking` of `pages`.

    index, pages (from `hit_of`): set when the index is loaded.
    """

    path = "/v1/search"
    about = "Find pages; result k answers query k. A bad query fails beside its siblings."
    name, done_label = "search", "searched"
    field, items = "queries", "queries"
    page = "retriever"
    response_type: type[BaseModel] = SearchResponse
    info_type = RetrieverInfo

    def __init__(
        self,
        routes: Callable[[FastAPI], None] = lambda app: None,
        compat_endpoints: Sequence[Endpoint] = (),
    ) -> None:
        self._routes = routes
        self.index: IndexRef
        self.pages: list[bytes] = []
        self.compat_endpoints = compat_endpoints

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the request's schema: queries, hits per query, and pages to exclude."""

        class SearchRequest(Wire):
            queries: Annotated[list[Query], FailFast()] = Field(min_length=1, max_length=max_items)
            top_k: Annotated[int, BeforeValidator(as_integer)] = Field(
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

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request, and add its excluded pages to every query.

        Raises RequestError for too many excluded pages."""
        queries = request.queries
        if len(queries) * len(request.exclude) > MOST_EXCLUDED_TOGETHER:
            limit = f"{MOST_EXCLUDED_TOGETHER:,}"
            raise RequestError("too_large", f"exclude: times the queries more than {limit}")
        if request.exclude:
            queries = [
                query.model_copy(update={"exclude": [*query.exclude, *request.exclude]})
                for query in queries
            ]
        return parsed_request(
            queries, request.top_k, request.cache, request.priority, request.timeout_s
        )

    def default_options(self, description: ModelDescription) -> SearchOptions:
        """Return options for ten hits."""
        return SearchOptions(10)

    def item_error(self, item: Query, max_chars: int) -> SampleError | None:
        """Return the error of a query that is too long, blank or invalid; None if it is valid."""
        reason = find_text_problem(item.query, max_chars)
        if reason is None and not item.query.strip():
            reason = "nothing but blanks"
        return SampleError("invalid_input", f"query: {reason}") if reason else None

    def cache_content(self, item: Query) -> Any:
        """Return the query and the excluded pages in a fixed order."""
        return [item.query, sorted(set(item.exclude))]

    def outcome_error(self, fields: dict[str, Any]) -> SampleError | None:
        """Return None: pages without a finite score are no hits."""
        return None

    def serialize_outcome(self, fields: dict[str, Any]) -> bytes:
        """Return the hits as JSON.

        The fields of a page are serialized once, when the index is loaded: doing it for each query
        costs as much as the search."""
        ranking: Ranking = fields["ranking"]
        if not all(math.isfinite(score) for _, score in ranking):
            raise ValueError("a score that is not finite")
        hits = [
            b'%b,"rank":%d,"score":%b}' % (self.pages[number], rank, repr(score).encode())
            for rank, (number, score) in enumerate(ranking, 1)
        ]
        return b'{"hits":[' + b",".join(hits) + b"]}"

    def is_valid_cached(
        self, value: bytes, item: Query, options: SearchOptions, description: ModelDescription
    ) -> bool:
        """Return True if a cached value has valid hits: pages of this index, ordered, not excluded,
        and at most `top_k`."""
        assert isinstance(description, RetrieverDescription)
        try:
            stored = _Stored.model_validate_json(value)
        except ValidationError:
            return False
        hits, excluded = stored.hits, set(item.exclude)
        scores = [hit.score for hit in hits]
        return (
            len(hits) <= options.top_k
            and [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
            and scores == sorted(scores, reverse=True)
            and all(
                hit.page_id in description.numbers and hit.page_id not in excluded for hit in hits
            )
            and all(hit.image == image_path(hit.page_id) for hit in hits)
        )

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the response body, with failed queries next to good ones."""
        head = b'{"index":' + to_json(self.index) + b',"results":['
        results = results_json([query.id for query in request.queries], answers, cached)
        return list_in_parts(head, results, b"]}")

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes of pages and their images."""
        self._routes(app)

    def info(self, common: dict[str, Any], description: ModelDescription) -> RetrieverInfo:
        """Return the index's info and the settings of its search."""
        assert isinstance(description, RetrieverDescription)
        common_fields = {
            name: value for name, value in common.items() if name in RetrieverInfo.model_fields
        }
        return RetrieverInfo(
            **common_fields | description.index.model_dump(),
            textless=description.textless,
            skipped=description.skipped,
            settings=description.settings,
            max_query_chars=description.max_query_chars,
        )


class _Stored(WireAnswer):
    hits: list[PageHit]


def parsed_request(
    queries: Sequence[Query],
    top_k: int,
    cache: bool = True,
    priority: Priority = "interactive",
    timeout_s: float | None = None,
) -> ParsedRequest:
    """Return the parsed request of any search endpoint. Raises RequestError for too many hits."""
    if len(queries) * top_k > MOST_HITS_TOGETHER:
        limit = f"{MOST_HITS_TOGETHER:,}"
        raise RequestError("too_large", f"hits: times the queries more than {limit}")
    cache = cache and top_k <= _MAX_CACHED_HITS
    return ParsedRequest(queries, SearchOptions(top_k), [top_k], cache, priority, timeout_s)


def hit_of(page: PageRecord) -> bytes:
    """Return the page's fields of a hit: a JSON object without its end, to append rank and
    score."""
    fields = {
        "page_id": page.page_id,
        "document": page.document,
        "page": page.page,
        "width": page.width,
        "height": page.height,
        "image": image_path(page.page_id),
    }
    return to_json(fields).removesuffix(b"}")


def image_path(page_id: str) -> str:
    """Return the path of a page's image on the service."""
    return f"/v1/pages/{quote(page_id, safe='')}/image"


class RetrievedPage(WireAnswer):
    """A page as Search-R1 has its passages: `contents` is its id, a line feed and its text."""

    id: str
    contents: str
    image: str


class ScoredPage(WireAnswer):
    """The same, where scores are asked for."""

    document: RetrievedPage
    score: float


class RetrieveResponse(WireAnswer):
    """The answer to `POST /retrieve`: entry k is of query k."""

    result: list[list[ScoredPage] | list[RetrievedPage]]


class SearchR1Endpoint(SearchEndpoint):
    """The endpoint `POST /retrieve`.

    text_of: returns a page's text by its id.
    """

    path = "/retrieve"
    about = "Find pages, as Search-R1 asks for them. A query that fails fails the request."
    response_type = RetrieveResponse

    def __init__(self, text_of: Callable[[str], str]) -> None:
        super().__init__()
        self._text_of = text_of

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the request's schema: `queries`, or one `query`."""

        class RetrieveRequest(Wire):
            queries: Annotated[list[str], FailFast()] = Field(
                default_factory=list, max_length=max_items
            )
            query: str | None = Field(None, description="In place of queries of one.")
            topk: Annotated[int | None, BeforeValidator(as_integer)] = Field(
                None, ge=1, le=MOST_HITS, description="null: 3."
            )
            return_scores: bool = False

            @model_validator(mode="after")
            def _one_of_both(self) -> Self:
                if bool(self.queries) == (self.query is not None):
                    raise ValueError("queries or query, one of both")
                return self

        return RetrieveRequest

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse both forms of a request."""
        return parsed_request(
            _queries(request.queries or [request.query]), request.topk or _RETRIEVED
        )

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the body. Raises RequestError if a query has failed."""
        results = [[self._written(hit, request.return_scores) for hit in h] for h in _all(answers)]
        return iter([to_json({"result": results})])

    def _written(self, hit: dict[str, Any], with_score: bool) -> dict[str, Any]:
        page_id = hit["page_id"]
        contents = f"{page_id}\n{self._text_of(page_id)}"
        page = {"id": page_id, "contents": contents, "image": hit["image"]}
        return {"document": page, "score": hit["score"]} if with_score else page


class SeenPage(WireAnswer):
    """A page as VRAG has it. idx: from 0 on, the best first. image_file: a path on this service."""

    idx: int
    image_file: str


class SeenPages(RootModel[list[list[SeenPage]]]):
    """The answer to `GET /search`: entry k is of query k."""


class VragEndpoint(SearchEndpoint):
    """The endpoint `GET /search?queries=...`."""

    path = "/search"
    about = "Find pages, as VRAG asks for them. A query that fails fails the request."
    method = "GET"
    response_type = SeenPages

    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the schema of the query string: `queries`, repeated for each query."""

        class SearchQueryString(Wire):
            queries: Annotated[list[str], FailFast()] = Field(min_length=1, max_length=max_items)

        return SearchQueryString

    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request; each query gets ten hits."""
        return parsed_request(_queries(request.queries), _SEARCHED)

    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the body. Raises RequestError if a query has failed."""
        results = [
            [{"idx": k, "image_file": hit["image"]} for k, hit in enumerate(hits)]
            for hits in _all(answers)
        ]
        return iter([to_json(results)])


def _queries(texts: Sequence[str]) -> list[Query]:
    """Return query objects without validation: an empty query fails later, like a blank one."""
    return [Query.model_construct(id=None, query=text, exclude=[]) for text in texts]


def _all(answers: Sequence[Answer | None]) -> list[list[dict[str, Any]]]:
    """Return the hits of each query.

    Raises RequestError if one failed: the response format has no field for an error."""
    for index, answer in enumerate(answers):
        if not isinstance(answer, bytes):
            error = answer or _LATE
            kind = "invalid_request" if error.type in TEXT_ERROR_TYPES else "unavailable"
            if error.type == "timeout":
                kind = "timeout"
            raise RequestError(kind, f"queries.{index}: {error}")
    return [from_json(answer)["hits"] for answer in answers if isinstance(answer, bytes)]
