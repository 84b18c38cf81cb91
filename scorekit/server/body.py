"""Reading a request's body: limits first, then its shape; faults are named, never echoed."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from scorekit.config import describe_errors
from scorekit.errors import RequestError
from scorekit.server.service import LARGE

MOST_FAULTS = 10


async def read_request(
    request: Request, request_type: type[BaseModel], max_bytes: int
) -> tuple[Any, int]:
    """The checked request and the bytes it had. Raises RequestError: too large, or not of the
    right shape."""
    body = await _read_body(request, max_bytes)
    if len(body) > LARGE:
        return await asyncio.to_thread(_parse, body, request_type), len(body)
    return _parse(body, request_type), len(body)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    too_large = RequestError("too_large", f"body: more than {max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    request.scope["body_read"] = True  # so that a refusal may leave the connection open
    return bytes(body)


def _parse(body: bytes, request_type: type[BaseModel]) -> BaseModel:
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
    many = next((f for f in faults if f["type"] == "too_long" and f["loc"] == ("samples",)), None)
    if many is not None:
        most = many["ctx"]["max_length"]
        raise RequestError("too_large", f"samples: more than {most} samples in a request")
    in_samples = [f for f in faults if f["loc"][:1] == ("samples",) and len(f["loc"]) > 1]
    if in_samples:
        others = [f for f in faults if f not in in_samples]
        faults = _all_sample_faults(body, request_type) + others
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


def _all_sample_faults(body: bytes, request_type: type[BaseModel]) -> list[ErrorDetails]:
    """Faults of the samples, one after another, until there are enough to name."""
    (sample_type,) = request_type.model_fields["samples"].annotation.__args__  # type: ignore[union-attr]
    adapter: TypeAdapter[Any] = TypeAdapter(sample_type)
    found: list[ErrorDetails] = []
    for index, sample in enumerate(from_json(body)["samples"]):
        try:
            adapter.validate_python(sample)
        except ValidationError as error:
            for fault in error.errors(include_input=False, include_url=False):
                fault["loc"] = ("samples", index, *fault["loc"])
                found.append(fault)
        if len(found) > MOST_FAULTS:
            break
    return found
