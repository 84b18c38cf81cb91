"""Read a request's body: check limits, then its form. Errors name the field, not its value.

An error that many items have is said once, with the first item and their number.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import Request

from scorekit.config import describe_errors
from scorekit.errors import RequestError
from scorekit.server.endpoint import Endpoint
from scorekit.server.http.checks import LARGE, parse_json, shown_name, without_mark
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.memory_budget import MemoryReservation, read_body

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
    return _validated(to_json(lists), shape)


def _parse(body: bytes, shape: RequestSchema, max_samples: int) -> BaseModel:
    body = without_mark(body)
    value = parse_json(body, max_samples)
    # JSON is parsed once for the check of its names and for the model, whose own parser would use
    # the last of two values. That parser decides about what is refused, and how it is said.
    with suppress(ValidationError):
        return shape.request_type.model_validate(value)
    del value
    return _validated(body, shape)


def _validated(body: bytes, shape: RequestSchema) -> BaseModel:
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
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _item_errors(
    items: list[Any], request_type: type[BaseModel], field: str, first: int
) -> list[ErrorDetails]:
    """Return errors of the items, in order. first: the index of the first wrong item."""
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
