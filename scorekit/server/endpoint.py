"""An endpoint that a backend names: its requests, outcomes and answers.

`score_endpoint.py` has the endpoint of scoring. All endpoints share the rest: batches across
callers, single flight, cache tiers, limits, keys, typed errors, statistics, the drain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from scorekit.errors import SampleError
from scorekit.schemas import ModelRef, Priority
from scorekit.server.description import ModelDescription

#: A good outcome as its endpoint serialized it, or the error.
Answer = bytes | SampleError
#: Serializes a line of a stream from the index of an item, its answer (None: late), and whether it
#: was cached.
Line = Callable[[int, Answer | None, bool], bytes]


@dataclass(slots=True)
class ParsedRequest:
    """A parsed request, as the queue and the cache need it.

    items: to answer, each on its own. options: for the backend's `encode`. key: what an outcome
    depends on besides its item and the model, as JSON. cache: whether to read cached answers and
    store new ones. timeout_s: None: the service's.
    """

    items: Sequence[Any]
    options: Any
    key: Any
    cache: bool = True
    priority: Priority = "interactive"
    timeout_s: float | None = None


class Endpoint(ABC):
    """An endpoint: the form of its requests, and how outcomes are checked, cached and answered.

    path, about: of the route, and its text in the OpenAPI document. name, done_label: what
    the model does with an item, as a verb and as a participle: `score`, `scored`. field, items: the
    field of a request with its items, and the plural word for them. streams: whether `path`/stream
    exists too, with one line per item (`lines`). method: POST, or GET with the request as query
    string.
    compat_endpoints: other forms of the same endpoint, compatible with other servers: their
    `parse_request` returns items and options of this one, their `render_response` gets its bytes.
    page: the page of scorekit/server/page at `/`; None: none. response_type, info_type: models of
    its answer and of `GET /v1/info`. cut_texts: names of an item's texts that a model may cut.
    """

    path: ClassVar[str]
    about: ClassVar[str]
    name: ClassVar[str]
    done_label: ClassVar[str]
    field: ClassVar[str]
    items: ClassVar[str]
    streams: ClassVar[bool] = False
    method: ClassVar[str] = "POST"
    page: str | None = None
    cut_texts: Sequence[str] = ()
    compat_endpoints: Sequence[Endpoint] = ()
    response_type: type[BaseModel]
    info_type: type[BaseModel]

    @abstractmethod
    def request_type(self, max_items: int) -> type[BaseModel]:
        """Return the model of a request with at most so many items in `field`."""

    @abstractmethod
    def parse_request(self, request: Any, description: ModelDescription) -> ParsedRequest:
        """Parse a request. description: what the backend's `load` returned, here and
        below.

        Raises UserError if the model does not support an option."""

    @abstractmethod
    def default_options(self, description: ModelDescription) -> Any:
        """Return the default options, for warming up and for health checks."""

    @abstractmethod
    def item_error(self, item: Any, max_chars: int) -> SampleError | None:
        """Return the error of an item that no model should get, or None."""

    @abstractmethod
    def cache_content(self, item: Any) -> Any:
        """Return all that an item's outcome may depend on; different items give different JSON."""

    @abstractmethod
    def outcome_error(self, fields: dict[str, Any]) -> SampleError | None:
        """Return the error if the backend's result is invalid, for example not finite."""

    def serialize_outcome(self, fields: dict[str, Any]) -> bytes:
        """Serialize a good outcome: the cache stores these bytes, and `answer` gets them.

        Raises ValueError if a number is not finite."""
        serialized = to_json(fields)
        if b"NaN" in serialized or b"Infinity" in serialized:  # in a text, or as a number
            from_json(serialized, allow_inf_nan=False)
        return serialized

    @abstractmethod
    def is_valid_cached(
        self, value: bytes, item: Any, options: Any, description: ModelDescription
    ) -> bool:
        """Return True if this service could have stored that value for this item.

        Other programs may write to the second cache tier."""

    @abstractmethod
    def render_response(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """Yield the body in parts. answers: by item, None if it is late. cached: indexes of cached
        ones.

        Raises RequestError at once, before the first part, if the request as a whole failed."""

    def lines(self, request: Any) -> Line:
        """Return the function that serializes the lines of this request's stream."""
        raise NotImplementedError

    def add_routes(self, app: FastAPI) -> None:  # noqa: B027  # most have none
        """Add further routes of the model besides the endpoint."""

    @abstractmethod
    def info(self, common: dict[str, Any], description: ModelDescription) -> BaseModel:
        """Return the answer to `GET /v1/info`. common: its fields that every endpoint has."""
