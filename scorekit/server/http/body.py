"""Read a request's body: check limits, then its form. Errors name the field, not its value."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import Request

from scorekit.config import MAX_ERRORS, describe_errors
from scorekit.errors import RequestError
from scorekit.server.endpoint import Endpoint
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.memory_budget import MemoryReservation
from scorekit.server.service import LARGE

#: Values and names that a sample may have on average in a large body: several times those of any
#: rubric.
VALUES_A_SAMPLE = 32
#: A separator and one value: a string, the start of an object or a list, a number or a word. It
#: matches everywhere and never backtracks, so the whole body is scanned once.
_VALUE = re.compile(
    rb'[\s,:\]}]*+(?:"(?:[^"\\]++|(?:\\.)++)*+"?|[\[{]|[^\s"\[\]{},:]++|\Z)', re.DOTALL
)


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
    body = await _read_body(request, settings.max_body_bytes, share)
    parsed: Any
    if len(body) > LARGE:
        # One at a time: for a moment, parsing takes many times the size of the body.
        async with share.budget.parsing:
            parsed = await asyncio.to_thread(_parse_large, body, shape, settings.max_samples)
    else:
        parsed = _parse(body, shape)
    share.count(getattr(parsed, shape.endpoint.field))
    return parsed


def read_query(request: Request, shape: RequestSchema) -> Any:
    """Return the checked request of a GET: the query string's values by name, each a list.

    Raises RequestError if its form is wrong."""
    params = request.query_params
    lists = {name: params.getlist(name) for name in params}
    return _parse(bytearray(to_json(lists)), shape)


async def _read_body(request: Request, max_bytes: int, share: MemoryReservation) -> bytearray:
    too_large = RequestError("too_large", f"body: more than {max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    async with share.receiving():
        async for chunk in request.stream():
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            share.reserve(len(chunk))
            body += chunk
    request.scope["body_read"] = True  # so that a refusal may leave the connection open
    return body


def _parse_large(body: bytearray, shape: RequestSchema, max_samples: int) -> BaseModel:
    """Parse a large body after counting its values.

    A body of megabytes may have millions of values. Parsing them takes a hundred times its bytes
    and holds the GIL for seconds; counting does neither."""
    max_values = VALUES_A_SAMPLE * max_samples + 1000
    if next(islice(_VALUE.finditer(body), max_values, None), None) is not None:
        raise RequestError("too_large", f"body: more than {max_values} values, names included")
    return _parse(body, shape)


def _parse(body: bytearray, shape: RequestSchema) -> BaseModel:
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
    item_errors = [
        detail for detail in errors if detail["loc"][:1] == (field,) and len(detail["loc"]) > 1
    ]
    if item_errors:
        other_errors = [detail for detail in errors if detail not in item_errors]
        errors = _item_errors(body, request_type, field) + other_errors
    for detail in errors:
        _hide_sender_names(detail, request_type)
    raise RequestError("invalid_request", describe_errors(errors, "body"))


def _hide_sender_names(error: ErrorDetails, request_type: type[BaseModel]) -> None:
    """Remove names that the sender chose from an error; list the valid fields instead."""
    model, location = request_type, error["loc"]
    for depth, name in enumerate(location):
        if isinstance(name, int):
            continue
        if name not in model.model_fields:
            error["loc"] = location[:depth]
            if error["type"] == "extra_forbidden":
                valid_fields = ", ".join(model.model_fields)
                error["msg"] = f"a field that is not known; there are {valid_fields}"
            else:
                error["msg"] = f"one of its further fields: {error['msg']}"
            return
        model = _model_in(model.model_fields[name].annotation) or model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field's value or of its list items; None for a plain value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _item_errors(body: bytearray, request_type: type[BaseModel], field: str) -> list[ErrorDetails]:
    """Return errors of the items, in order, until there are enough to report."""
    (item_type,) = get_args(request_type.model_fields[field].annotation)
    adapter: TypeAdapter[Any] = TypeAdapter(item_type)
    errors: list[ErrorDetails] = []
    raw_items = from_json(body)[field]
    for index, item in enumerate(raw_items if isinstance(raw_items, list) else [raw_items]):
        try:
            adapter.validate_python(item)
        except ValidationError as error:
            for detail in error.errors(include_input=False, include_url=False):
                detail["loc"] = (field, index, *detail["loc"])
                errors.append(detail)
        if len(errors) > MAX_ERRORS:
            break
    return errors
