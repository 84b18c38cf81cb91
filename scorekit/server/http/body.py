"""Reading a request's body: limits first, then its shape; faults are named, never echoed."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import Request

from scorekit.config import describe_errors
from scorekit.errors import RequestError
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.queue.budget import Share
from scorekit.server.service import LARGE
from scorekit.server.verb import Verb

MOST_FAULTS = 10
#: Values and names that a sample may have, itself included, where a body is large: several times
#: those of any rubric.
VALUES_A_SAMPLE = 32
#: What separates values, then one of them: a string, the start of an object or a list, a number or
#: a word. It matches everywhere and gives nothing back, so the whole body is looked at once.
_VALUE = re.compile(
    rb'[\s,:\]}]*+(?:"(?:[^"\\]++|(?:\\.)++)*+"?|[\[{]|[^\s"\[\]{},:]++|\Z)', re.DOTALL
)


@dataclass(slots=True, frozen=True)
class Shape:
    """What a request has to look like."""

    verb: Verb
    request_type: type[BaseModel]


async def read_request(
    request: Request, shape: Shape, settings: ServiceSettings, share: Share
) -> Any:
    """The checked request, whose bytes `share` then holds. Raises RequestError: too large, no room
    now, or not of the right shape."""
    body = await _read_body(request, settings.max_body_bytes, share)
    asked: Any
    if len(body) > LARGE:
        # One at a time: what is parsed takes many times its size for a moment.
        async with share.budget.parsing:
            asked = await asyncio.to_thread(_parse_large, body, shape, settings.max_samples)
    else:
        asked = _parse(body, shape)
    share.count(getattr(asked, shape.verb.field))
    return asked


def read_query(request: Request, shape: Shape) -> Any:
    """The checked request of a GET: the query string's values by name, each a list. Raises
    RequestError where it is not of the right shape."""
    given = request.query_params
    lists = {name: given.getlist(name) for name in given}
    return _parse(bytearray(to_json(lists)), shape)


async def _read_body(request: Request, max_bytes: int, share: Share) -> bytearray:
    too_large = RequestError("too_large", f"body: more than {max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    async with share.receiving():
        async for chunk in request.stream():
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            share.grow(len(chunk))
            body += chunk
    request.scope["body_read"] = True  # so that a refusal may leave the connection open
    return body


def _parse_large(body: bytearray, shape: Shape, max_samples: int) -> BaseModel:
    """A body of megabytes may hold millions of values, whose parsing takes a hundred times its
    bytes and holds the interpreter for seconds: they are counted first, which does neither."""
    most = VALUES_A_SAMPLE * max_samples + 1000
    if next(islice(_VALUE.finditer(body), most, None), None) is not None:
        raise RequestError("too_large", f"body: more than {most} values, names included")
    return _parse(body, shape)


def _parse(body: bytearray, shape: Shape) -> BaseModel:
    request_type, field = shape.request_type, shape.verb.field
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
    many = next((f for f in faults if f["type"] == "too_long" and f["loc"] == (field,)), None)
    if many is not None:
        most = many["ctx"]["max_length"]
        items = shape.verb.items
        raise RequestError("too_large", f"{field}: more than {most} {items} in a request")
    in_items = [f for f in faults if f["loc"][:1] == (field,) and len(f["loc"]) > 1]
    if in_items:
        others = [f for f in faults if f not in in_items]
        faults = _all_item_faults(body, request_type, field) + others
    for fault in faults:
        _say_no_foreign_name(fault, request_type)
    raise RequestError("invalid_request", describe_errors(faults, "body", MOST_FAULTS))


def _say_no_foreign_name(fault: ErrorDetails, request_type: type[BaseModel]) -> None:
    """Whose name is not ours is text of the sender, as a value is: say what there is instead."""
    model, place = request_type, fault["loc"]
    for depth, part in enumerate(place):
        if isinstance(part, int):
            continue
        if part not in model.model_fields:
            fault["loc"] = place[:depth]
            if fault["type"] == "extra_forbidden":
                known = ", ".join(model.model_fields)
                fault["msg"] = f"a field that is not known; there are {known}"
            else:
                fault["msg"] = f"one of its further fields: {fault['msg']}"
            return
        model = _model_in(model.model_fields[part].annotation) or model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The type of what a field holds, or its list; None for a plain value."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def _all_item_faults(
    body: bytearray, request_type: type[BaseModel], field: str
) -> list[ErrorDetails]:
    """Faults of the items, one after another, until there are enough to name."""
    (item_type,) = get_args(request_type.model_fields[field].annotation)
    adapter: TypeAdapter[Any] = TypeAdapter(item_type)
    found: list[ErrorDetails] = []
    given = from_json(body)[field]
    for index, item in enumerate(given if isinstance(given, list) else [given]):
        try:
            adapter.validate_python(item)
        except ValidationError as error:
            for fault in error.errors(include_input=False, include_url=False):
                fault["loc"] = (field, index, *fault["loc"])
                found.append(fault)
        if len(found) > MOST_FAULTS:
            break
    return found
