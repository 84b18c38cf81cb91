"""Receive a request's body within a limit on the bytes of all requests, and check its form.

The limit of a single request is not enough: sixty bodies of the largest size are too much. Bytes
count as they arrive, so an announced length costs nothing, and until the request is answered. When
the budget is used up, slow senders are cancelled first: a client that sends a byte now and then
must not block others.

Errors of the form name the field, not its value. An error that many items have is said once, with
the first item and their number.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sized
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import Request

from scorekit.config import describe_errors
from scorekit.errors import RequestError, UserError
from scorekit.server.endpoint import LARGE, Endpoint, parse_json, shown_name, without_mark
from scorekit.server.settings import ServiceSettings

#: Approximate bytes of a sample besides its texts: the objects of the service.
SAMPLE_BYTES = 1024
#: Requests beyond this size leave a quarter of the budget to smaller ones.
_LARGE = 2**20
#: Most bytes of a packed body that are unpacked at once.
_UNPACKED = 64 * 1024
#: Bytes that a sender has to send in `_STRETCH_S`, or it is slow.
_STRETCH, _STRETCH_S = 64 * 1024, 1.0
_RETRY_AFTER_S = 2.0


async def read_body(
    chunks: AsyncIterator[bytes],
    headers: Mapping[str, str],
    max_bytes: int,
    share: MemoryReservation,
) -> bytes:
    """Return the body of a request, whose bytes `share` then holds; one with gzip unpacked.

    chunks: of the body, as they arrive. Raises RequestError if it is too large, unpacked or not, if
    the budget is used up, or if it is no gzip though it says so."""
    message = f"body: more than {max_bytes} bytes"
    if int(headers.get("content-length", "0")) > max_bytes:
        raise RequestError("too_large", message)
    is_packed = headers.get("content-encoding", "").strip().lower() == "gzip"
    unpack = _unpack if is_packed else _as_it_is
    body = bytearray()
    async with share.receiving():
        async for part in unpack(chunks):
            if len(body) + len(part) > max_bytes:
                raise RequestError("too_large", message)
            share.reserve(len(part))
            body += part
    return bytes(body)


async def _as_it_is(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk


async def _unpack(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of a gzip in parts of at most `_UNPACKED`: a small one may hold gigabytes."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        async for chunk in chunks:
            pending = chunk
            while pending and not unpacker.eof:
                yield unpacker.decompress(pending, _UNPACKED)
                pending = unpacker.unconsumed_tail
            if unpacker.unused_data or (unpacker.eof and pending):
                raise RequestError("invalid_request", "body: bytes after the end of the gzip")
    except zlib.error as error:
        raise RequestError("invalid_request", f"body: not gzip: {error}") from None
    if not unpacker.eof:
        raise RequestError("invalid_request", "body: the gzip ends too early")


class MemoryBudget:
    """Limits the bytes in use to `max_bytes`. Raises UserError if the largest body would never fit.

    Owner: the event loop.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_large_bytes = max_bytes * 3 // 4
        if max_body_bytes > self.max_large_bytes:
            raise UserError(
                f"--max-inflight-bytes {max_bytes}: a body may have {max_body_bytes} bytes "
                "(--max-body-bytes), which must be three quarters of it at most"
            )
        self.reserved = 0
        self.parsing = asyncio.Lock()  # large bodies are parsed one at a time
        self.receiving: set[MemoryReservation] = set()

    def share(self) -> MemoryReservation:
        """Return a reservation for one request; the caller closes it."""
        return MemoryReservation(self)

    def make_room(self, size: int, limit: int, asker: MemoryReservation) -> bool:
        """Cancel slow senders until `size` more bytes fit below `limit`; return whether they do."""
        if self.reserved + size <= limit:
            return True
        now = time.monotonic()
        slow_senders = [
            share
            for share in self.receiving
            if share is not asker and now - share.moved > _STRETCH_S
        ]
        for share in sorted(slow_senders, key=lambda share: share.moved):
            share.cancel()
            if self.reserved + size <= limit:
                return True
        return False


class MemoryReservation:
    """The bytes reserved for one request.

    moved: when its sender last completed a stretch of bytes.

    Owner: the event loop.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self._limit: asyncio.Timeout | None = None
        self._stretch = 0
        self.moved = time.monotonic()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def reserve(self, size: int) -> None:
        """Reserve bytes. Raises RequestError: `overloaded`, or `too_large` if they never fit."""
        budget = self.budget
        limit = budget.max_large_bytes if self.size + size > _LARGE else budget.max_bytes
        if self.size + size > limit:
            raise RequestError(
                "too_large",
                f"more than {limit} bytes, samples counted as {SAMPLE_BYTES} bytes and their texts",
            )
        if not budget.make_room(size, limit, self):
            message = "too many bytes are in flight"
            raise RequestError("overloaded", message, retry_after=_RETRY_AFTER_S)
        self.size += size
        budget.reserved += size
        self._stretch += size
        if self._stretch >= _STRETCH:
            self._stretch = 0
            self.moved = time.monotonic()

    def count(self, samples: Sized) -> None:
        """Reserve what the samples cost besides their texts."""
        self.reserve(len(samples) * SAMPLE_BYTES)

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Mark the body as being received within the block.

        Raises RequestError `overloaded` if it is cancelled in favor of faster senders."""
        self.moved = time.monotonic()
        self.budget.receiving.add(self)
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            message = "too many bytes are in flight, and this request arrived slowly"
            raise RequestError("overloaded", message, retry_after=_RETRY_AFTER_S) from None
        finally:
            self.budget.receiving.discard(self)

    def cancel(self) -> None:
        """Cancel the reservation: its receiving ends, and its bytes are released."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)
        self.budget.receiving.discard(self)
        self.close()

    def close(self) -> None:
        """Release all bytes; a second call does nothing."""
        self.budget.reserved -= self.size
        self.size = 0


#: An invalid request is searched for errors of at most so many items, from its first wrong item
#: on: a request of 10,000 wrong ones would hold the loop otherwise.
MAX_CHECKED_ITEMS = 1000


@dataclass(slots=True, frozen=True)
class RequestSchema:
    """The form of an endpoint's requests."""

    endpoint: Endpoint
    request_type: type[BaseModel]


async def read_request(
    request: Request, shape: RequestSchema, settings: ServiceSettings, share: MemoryReservation
) -> Any:
    """Return the checked request, whose bytes `share` then holds.

    Raises RequestError if it is too large, if the budget is used up, or if its form is wrong."""
    body = await read_body(request.stream(), request.headers, settings.max_body_bytes, share)
    request.scope["body_read"] = True  # so that a refusal may leave the connection open
    parsed: Any
    if len(body) > LARGE:
        # One at a time: for a moment, parsing takes many times the size of the body.
        async with share.budget.parsing:
            parsed = await asyncio.to_thread(_parse, body, shape, settings.max_samples)
    else:
        parsed = _parse(body, shape, settings.max_samples)
    share.count(getattr(parsed, shape.endpoint.field))
    return parsed


def read_query(request: Request, shape: RequestSchema) -> Any:
    """Return the checked request of a GET: the query string's values by name, each a list.

    Raises RequestError if its form is wrong."""
    params = request.query_params
    lists = {name: params.getlist(name) for name in params}
    return _validate(to_json(lists), shape)


def _parse(body: bytes, shape: RequestSchema, max_samples: int) -> BaseModel:
    body = without_mark(body)
    value = parse_json(body, max_samples)
    # JSON is parsed once for the check of its names and for the model, whose own parser would use
    # the last of two values. That parser decides about what is refused, and how it is said.
    with suppress(ValidationError):
        return shape.request_type.model_validate(value)
    del value
    return _validate(body, shape)


def _validate(body: bytes, shape: RequestSchema) -> BaseModel:
    request_type, field = shape.request_type, shape.endpoint.field
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_input=False, include_url=False)
    too_long = next(
        (detail for detail in errors if detail["type"] == "too_long" and detail["loc"] == (field,)),
        None,
    )
    if too_long is not None:
        max_items = too_long["ctx"]["max_length"]
        items = shape.endpoint.items
        raise RequestError("too_large", f"{field}: more than {max_items} {items} in a request")
    unchecked = ""
    is_of_item = [
        detail["loc"][:1] == (field,)
        and len(detail["loc"]) > 1
        and isinstance(detail["loc"][1], int)
        for detail in errors
    ]
    if True in is_of_item:
        first = errors[is_of_item.index(True)]["loc"][1]
        other_errors = [detail for i, detail in enumerate(errors) if not is_of_item[i]]
        raw_items = from_json(body)[field]
        item_list = raw_items if isinstance(raw_items, list) else [raw_items]
        last = int(first) + MAX_CHECKED_ITEMS
        errors = _item_errors(item_list[:last], request_type, field, int(first)) + other_errors
        if len(item_list) > last:
            unchecked = f"; {shape.endpoint.items} from {field}.{last} on were not checked"
    for detail in errors:
        _describe_sender_names(detail, request_type)
    raise RequestError("invalid_request", describe_errors(errors, "body") + unchecked)


def _describe_sender_names(error: ErrorDetails, request_type: type[BaseModel]) -> None:
    """Move a name that the sender chose into the message, and list the valid fields."""
    model, location = request_type, error["loc"]
    for depth, name in enumerate(location):
        if isinstance(name, int):
            continue
        if name not in model.model_fields:
            error["loc"] = location[:depth]
            if error["type"] == "extra_forbidden":
                valid_fields = ", ".join(model.model_fields)
                error["msg"] = f"{shown_name(name)} is not a known field; there are {valid_fields}"
            else:
                error["msg"] = f"{shown_name(name)}: {error['msg']}"
            return
        model = _model_in(model.model_fields[name].annotation) or model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field's value or of its list items; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _item_errors(
    items: list[Any], request_type: type[BaseModel], field: str, first: int
) -> list[ErrorDetails]:
    """Return errors of the items, in order.

    first: the index of the first wrong item.
    """
    (item_type,) = get_args(request_type.model_fields[field].annotation)
    adapter: TypeAdapter[Any] = TypeAdapter(item_type)
    errors: list[ErrorDetails] = []
    for index, item in enumerate(items[first:], first):
        try:
            adapter.validate_python(item)
        except ValidationError as error:
            for detail in error.errors(include_input=False, include_url=False):
                detail["loc"] = (field, index, *detail["loc"])
                errors.append(detail)
    return errors
