"""Endpoints in the formats of other servers, for their existing clients: Search-R1's `POST
/retrieve` (also used by SkyRL and verl) and VRAG's `GET /search`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, RootModel, model_validator
from pydantic_core import from_json, to_json

from scorekit.errors import TEXT_ERROR_TYPES, RequestError, SampleError
from scorekit.schemas import ModelRef, Wire, WireAnswer, as_integer
from scorekit.server.endpoint import Answer, ModelDescription, ParsedRequest
from services.retriever.endpoint import MOST_HITS, Query, SearchEndpoint, parsed_request

#: Default number of hits, as on those servers.
_RETRIEVED, _SEARCHED = 3, 10
_LATE = SampleError("timeout", "not searched in time")


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
    """The endpoint `POST /retrieve`. text_of: returns a page's text by its id."""

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
