"""Requests that trainers send to an adapter over HTTP: their form, and the routes for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from scorekit.config import describe_validation_error
from scorekit.errors import RequestError, ScorekitError, UserError

RequestT = TypeVar("RequestT", bound=BaseModel)
#: Largest body of a request, and the seconds until it has arrived, as for our services.
MAX_BODY_BYTES, RECEIVE_TIMEOUT_S = 16 * 2**20, 30.0
#: Tokens that models put at the end of a turn; they are not part of the translation.
END_MARKS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<eos>", "</s>", "<pad>")


class RewardRequest(BaseModel):
    """A request of OpenRLHF; labels may be null."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A request of slime; the prompt may be chat messages, the label null."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


def without_end_marks(text: str, end_marks: Sequence[str]) -> str:
    """Return the text without the marks at its end and the white space around them."""
    while True:
        bare = text.rstrip()
        mark = next((mark for mark in end_marks if mark and bare.endswith(mark)), None)
        if mark is None:
            return text
        text = bare.removesuffix(mark)


def completion_of(
    query: str, prompt: str, end_marks: Sequence[str] = END_MARKS, turn_mark: str | None = None
) -> str:
    """Return the completion: the query after its prompt, without the marks at its end.

    turn_mark: the text that begins the model's turn. If it is set, the query need not contain the
    prompt unchanged: the completion begins after as many of these marks as the prompt has.

    Raises UserError if the start of the completion cannot be found.
    """
    if turn_mark is not None:
        turns = prompt.count(turn_mark)
        segments = query.split(turn_mark, turns)
        if not turns or len(segments) <= turns:
            raise UserError(f"{turn_mark!r} does not stand in prompt and query")
        text = segments[-1]
    elif prompt in query:
        text = query[query.index(prompt) + len(prompt) :]
    else:
        raise UserError(
            "the prompt does not stand in the query letter by letter (cut, or changed by the "
            "tokenizer): say --turn-mark"
        )
    return without_end_marks(text, end_marks)


def fields_of(label: Any) -> dict[str, Any]:
    """Return the fields of a label: those of its JSON object, and the full label as `label`."""
    fields: dict[str, Any] = {}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            fields = from_json(label)
        except ValueError:
            fields = {}
    elif isinstance(label, dict):
        fields = label
    return {**fields, "label": label}


def parse_body(request_type: type[RequestT], body: bytes) -> RequestT:
    """Return the request of a body. Raises UserError that names each wrong field."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        raise UserError(describe_validation_error(error, "body")) from None


def create_routes(
    posts: Mapping[str, Callable[[bytes], Awaitable[Any]]],
    gets: Mapping[str, Callable[[], Any]],
    check: Callable[[Any], None] = lambda request: None,
) -> Any:
    """Return an ASGI application that answers JSON, and a text for Prometheus where it gets one.

    posts, gets: the functions that return the answers, by path; those of posts get the body. A
    UserError of theirs is answered with status 422, TimeoutError with 504, another error of ours
    with 502. check: raises RequestError for a POST that is refused, before its body is read.
    """
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(content: Any, status: int = 200) -> Response:
        if isinstance(content, str):
            return Response(content, media_type="text/plain; version=0.0.4")
        return Response(to_json(content), status, media_type="application/json")

    def failed(status: int, error: Exception) -> Response:
        message = " ".join(str(error).split())
        return answer({"error": {"type": type(error).__name__, "message": message}}, status)

    def post(path: str, handle: Callable[[bytes], Awaitable[Any]]) -> Route:
        async def respond(request: Request) -> Response:
            try:
                check(request)
                body = await _read_body(request)
            except RequestError as error:
                return failed(error.status, error)
            except ClientDisconnect as error:
                return failed(400, error)
            try:
                return answer(await handle(body))
            except UserError as error:
                return failed(422, error)
            except TimeoutError:
                return failed(504, RequestError("timeout", "not scored before the deadline"))
            except ScorekitError as error:
                return failed(502, error)

        return Route(path, respond, methods=["POST"])

    def get(path: str, render: Callable[[], Any]) -> Route:
        async def respond(request: Request) -> Response:
            return answer(render())

        return Route(path, respond)

    application = Starlette(
        routes=[*(post(*pair) for pair in posts.items()), *(get(*pair) for pair in gets.items())]
    )
    # A redirect contains an address and a scheme. Behind a proxy the trainer cannot use them, and a
    # client that can would send its texts a second time.
    application.router.redirect_slashes = False
    return application


async def _read_body(request: Any) -> bytes:
    """Return the body of a request of starlette. Raises RequestError if it is too large or slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError("too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestError("slow_request", f"no body within {RECEIVE_TIMEOUT_S:g} s") from None
    return bytes(body)
