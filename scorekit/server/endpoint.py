"""An endpoint that a backend names: its requests, outcomes and answers, and checks of texts.

`score_endpoint.py` has the endpoint of scoring. All endpoints share the rest: batches across
callers, single flight, cache tiers, limits, keys, typed errors, statistics, the drain.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import ModelRef, Priority

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(slots=True, kw_only=True)
class ModelDescription:
    """The static part of `GET /v1/info`; an endpoint may add fields (`ScoreDescription`)."""

    model: str
    revision: str
    tokenizer: str
    dtype: str
    device: str
    max_input_length: int
    versions: dict[str, str | None] = field(default_factory=dict)
    #: Who multiplies float32 matrices on a CPU, torch or onednn; None: the service has no network.
    #: No part of the cache key: both give the same scores within float32's accuracy.
    matmul: str | None = None
    #: Other settings that change an outcome (attention backend, layer transformation, tokenizer
    #: digest). They are part of the cache key.
    engine: dict[str, str] = field(default_factory=dict)
    #: Most padded tokens of a batch, unless the settings have a number; None: by the device.
    batch_tokens: int | None = None


#: A good outcome as its endpoint serialized it, or the error.
Answer = bytes | SampleError
#: Serializes a line of a stream from the index of an item, its answer (None: late), and whether it
#: was cached.
Line = Callable[[int, Answer | None, bool], bytes]


@dataclass(slots=True)
class ParsedRequest:
    """A parsed request, as the queue and the cache need it.

    items: to answer, each on its own.
    options: for the backend's `encode`.
    key: what an outcome depends on besides its item and the model, as JSON.
    cache: whether to read cached answers and store new ones.
    timeout_s: None: the service's.
    """

    items: Sequence[Any]
    options: Any
    key: Any
    cache: bool = True
    priority: Priority = "interactive"
    timeout_s: float | None = None


class Endpoint(ABC):
    """An endpoint: the form of its requests, and how outcomes are checked, cached and answered.

    path, about: of the route, and its text in the OpenAPI document.
    name, done_label: what the model does with an item, as a verb and as a participle: `score`,
    `scored`.
    field, items: the field of a request with its items, and the plural word for them.
    streams: whether `path`/stream exists too, with one line per item (`lines`).
    method: POST, or GET with the request as query string.
    compat_endpoints: other forms of the same endpoint, compatible with other servers: their
    `parse_request` returns items and options of this one, their `render_response` gets its bytes.
    page: the page of scorekit/server/page at `/`; None: none.
    response_type, info_type: models of its answer and of `GET /v1/info`.
    cut_texts: names of an item's texts that a model may cut.
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
        """Parse a request.

        description: what the backend's `load` returned, here and below.

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
        """Yield the body in parts.

        answers: by item, None if it is late.
        cached: indexes of cached ones.

        Raises RequestError at once, before the first part, if the request as a whole failed."""

    def lines(self, request: Any) -> Line:
        """Return the function that serializes the lines of this request's stream."""
        raise NotImplementedError

    def add_routes(self, app: FastAPI) -> None:  # noqa: B027  # most have none
        """Add further routes of the model besides the endpoint."""

    @abstractmethod
    def info(self, common: dict[str, Any], description: ModelDescription) -> BaseModel:
        """Return the answer to `GET /v1/info`.

        common: its fields that every endpoint has.
        """


#: Approximate bytes of a part of the body.
PART = 256 * 1024

_LATE = SampleError("timeout", "not scored in time")


def result_json(name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """Return the result of a sample.

    name: its id.
    answer: None if it is late, a `timeout`.
    """
    start = b'{"id":' + (b"null" if name is None else to_json(name))
    answer = answer or _LATE
    if isinstance(answer, SampleError):
        return start + b"," + to_json({"ok": False, "error": answer.wire(), **answer.paid})[1:]
    return start + b',"ok":true,"cached":' + (b"true," if cached else b"false,") + answer[1:]


def body_parts(
    ids: Sequence[str | None], answers: Sequence[Answer | None], cached: Set[int], model: ModelRef
) -> Iterator[bytes]:
    """Yield the body of `POST /v1/score` in parts.

    cached: indexes of cached answers.

    Equal samples share one answer in memory, so the full body may be a hundred times larger.
    """
    head = b'{"model":' + to_json(model) + b',"results":['
    return list_in_parts(head, results_json(ids, answers, cached), b"]}")


def results_json(
    ids: Sequence[str | None], answers: Sequence[Answer | None], cached: Set[int]
) -> Iterator[bytes]:
    """Yield the result of each sample.

    cached: indexes of cached answers.
    """
    for index, (name, answer) in enumerate(zip(ids, answers, strict=True)):
        yield result_json(name, answer, index in cached)


def list_in_parts(head: bytes, items: Iterable[bytes], end: bytes) -> Iterator[bytes]:
    """Yield a JSON document around a list, in parts of about `PART` bytes.

    head: what is before the first item.
    end: what is after the last one."""
    parts, size = [head], 0
    for index, item in enumerate(items):
        parts += [b",", item] if index else [item]
        size += len(item)
        if size > PART:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, end])


def line_json(index: int, name: str | None, answer: Answer | None, cached: bool) -> bytes:
    """Return one line of a stream."""
    result = result_json(name, answer, cached)
    return b'{"index":' + str(index).encode() + b"," + result[1:] + b"\n"


#: Bodies of at most so many bytes are parsed without counting their values.
LARGE = 256 * 1024
#: Values and names that a sample may have on average in a large body: several times those of any
#: rubric.
VALUES_A_SAMPLE = 32
#: What some writers of UTF-8 put before a text (Windows, .NET).
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: A separator and one value: a string, the start of an object or a list, a number or a word. It
#: matches everywhere and never backtracks, so the whole body is scanned once.
_VALUE = re.compile(
    rb'[\s,:\]}]*+(?:"(?:[^"\\]++|(?:\\.)++)*+"?|[\[{]|[^\s"\[\]{},:]++|\Z)', re.DOTALL
)
#: Characters of a sender's name that an error shows.
_SHOWN_CHARACTERS = 40
_DUPLICATE = 'Detected duplicate key "'


def without_mark(body: bytes) -> bytes:
    """Return a body without a byte order mark before it."""
    return body.removeprefix(_BYTE_ORDER_MARK)


def parse_json(body: bytes, max_samples: int) -> Any:
    """Return the value of a JSON body, which has no byte order mark.

    Raises RequestError if it is no JSON, if a large body has too many values, or if an object has a
    name twice: parsers would use the last value in silence.
    """
    import jiter

    if len(body) > LARGE:
        # A body of megabytes may have millions of values. Parsing them takes a hundred times its
        # bytes and holds the GIL for seconds; counting does neither.
        max_values = VALUES_A_SAMPLE * max_samples + 1000
        if next(islice(_VALUE.finditer(body), max_values, None), None) is not None:
            raise RequestError("too_large", f"body: more than {max_values} values, names included")
    try:
        return jiter.from_json(body, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        problem = f"Invalid JSON: {error}"
        if str(error).startswith(_DUPLICATE):
            name, _, position = str(error).removeprefix(_DUPLICATE).rpartition('" at ')
            problem = f"the name {shown_name(name)} stands twice in an object, at {position}. "
            problem += "Give it once"
        raise RequestError("invalid_request", f"body: {problem}") from None


def shown_name(name: str) -> str:
    """Return a name that the sender chose for an error: escaped, in quotes, and cut."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "...")


def text_error(sample: Any, max_chars: int = sys.maxsize) -> SampleError | None:
    """Return the error if a model must not read a text of this sample; None if all are valid.

    max_chars: max characters (code points) of a text.
    """
    values = sample.__dict__
    sample_type: type[BaseModel] = type(sample)
    names = _text_fields(sample_type)
    if sample.model_extra:  # texts defined by a rubric
        values = values | sample.model_extra
        names += tuple(sample.model_extra)
    for name in names:
        value = values[name]
        problem = find_text_problem(value, max_chars) if value else None
        if problem is not None:
            # The name of another field may be any text.
            is_own_field = name in sample_type.model_fields
            return SampleError("invalid_input", f"{name if is_own_field else 'a text'}: {problem}")
    return None


def find_text_problem(text: str, max_chars: int) -> str | None:
    """Return the reason why a model must not read this text; None if it is valid."""
    if len(text) > max_chars:
        return f"{len(text):,} characters, at most {max_chars:,}"
    if "\0" in text:
        return f"NUL character at position {text.index(chr(0))}"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"lone surrogate at position {error.start}"
    return None


@cache
def _text_fields(sample_type: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the fields that hold text for the model."""
    return tuple(
        name
        for name, field in sample_type.model_fields.items()
        if name != "id" and field.annotation in (str, str | None)
    )
