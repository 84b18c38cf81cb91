"""What a service is asked, and how it answers: the verb that a backend names.

Scoring is one (`scoring.py`). Whatever stands round a model is the same for all: batches across
callers, single flight, the cache's tiers, limits, keys, typed failures, figures, the drain.
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
from scorekit.server.description import Description

#: A good outcome as its verb writes it, or why there is none.
Answer = bytes | SampleError
#: One line of a stream: index of an item, its answer (None: late), whether the cache had it.
Line = Callable[[int, Answer | None, bool], bytes]


@dataclass(slots=True)
class Asked:
    """A checked request, as the queue and the cache need to know it.

    items: what is asked about; each is answered for itself. options: what the backend's `encode`
    gets. key: what an outcome depends on besides its item and the model, as JSON can write it.
    cache: whether known answers are taken and new ones kept. timeout_s: None: the service's.
    """

    items: Sequence[Any]
    options: Any
    key: Any
    cache: bool = True
    priority: Priority = "interactive"
    timeout_s: float | None = None


class Verb(ABC):
    """A route: the shape of its requests, what makes an outcome good, how it is kept and answered.

    path, about: of the route, and what its OpenAPI document says of it. name, done: what the model
    does with an item, and what the item then is: `score`, `scored`. field, items: of a request, the
    list of its items, and what several of them are called. streams: whether `path`/stream answers
    too, an item a line (`lines`). method: POST, or GET, whose request is its query string. faces:
    the same verb in other clothes, as other servers have it: their `read` gives items and options
    of this one, their `answer` what it wrote. page: which page of scorekit/server/page
    tries it at `/`; None: none. response_type, info_type: the shapes of its answer, and of
    `GET /v1/info`.
    """

    path: ClassVar[str]
    about: ClassVar[str]
    name: ClassVar[str]
    done: ClassVar[str]
    field: ClassVar[str]
    items: ClassVar[str]
    streams: ClassVar[bool] = False
    method: ClassVar[str] = "POST"
    page: str | None = None
    faces: Sequence[Verb] = ()
    response_type: type[BaseModel]
    info_type: type[BaseModel]

    @abstractmethod
    def request_type(self, max_items: int) -> type[BaseModel]:
        """The shape of a request with at most so many items in `field`."""

    @abstractmethod
    def read(self, request: Any, told: Description) -> Asked:
        """What a request asks for. told: what the backend said when it was loaded, here and below.
        Raises UserError where the model cannot do as the request says."""

    @abstractmethod
    def plain_options(self, told: Description) -> Any:
        """Options of a request that names none: for warming up and for health checks."""

    @abstractmethod
    def item_fault(self, item: Any, max_chars: int) -> SampleError | None:
        """Why no model should read this item; None if all is well."""

    @abstractmethod
    def content(self, item: Any) -> Any:
        """All of an item that its outcome may depend on: no two that differ give the same JSON."""

    @abstractmethod
    def outcome_fault(self, fields: dict[str, Any]) -> SampleError | None:
        """Why an outcome is none, whatever the backend says (a number that is not finite)."""

    def write(self, fields: dict[str, Any]) -> bytes:
        """A good outcome, written once: the cache keeps these bytes, `answer` gets them. Raises
        ValueError where a number is not finite."""
        written = to_json(fields)
        if b"NaN" in written or b"Infinity" in written:  # in a text, or as a number
            from_json(written, allow_inf_nan=False)
        return written

    @abstractmethod
    def fits(self, value: bytes, item: Any, options: Any, told: Description) -> bool:
        """Whether this service could have written that value for this item: others may write to
        the second cache tier, too."""

    @abstractmethod
    def answer(
        self, request: Any, answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
    ) -> Iterator[bytes]:
        """The body, in parts. answers: by item, None where it is late. cached: indexes of those
        that the cache had. Raises RequestError at once, before the first part is asked for, where
        the request as a whole has failed."""

    def lines(self, request: Any) -> Line:
        """What writes the lines of this request's stream."""
        raise NotImplementedError

    def add_routes(self, app: FastAPI) -> None:  # noqa: B027  # most have none
        """Add what else there is to be had of the model, besides the verb."""

    @abstractmethod
    def info(self, common: dict[str, Any], told: Description) -> BaseModel:
        """The answer to `GET /v1/info`. common: what stands there for every verb."""
