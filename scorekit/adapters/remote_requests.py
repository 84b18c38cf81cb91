"""Requests that trainers send to an adapter over HTTP: their form, and the routes for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, FailFast, ValidationError
from pydantic_core import from_json, to_json

from scorekit.config import describe_validation_error
from scorekit.errors import RequestError, ScorekitError, UserError
from scorekit.text.end_marks import without_end_marks

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from scorekit.server.bridge import BridgeMiddleware
    from scorekit.server.connection import Access

RequestT = TypeVar("RequestT", bound=BaseModel)


class RewardRequest(BaseModel):
    """A request of OpenRLHF; labels may be null."""

    # FailFast: an invalid body must not cost a list of all its errors.
    query: Annotated[list[str], FailFast()]
    prompts: Annotated[list[str], FailFast()]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A request of slime; the prompt may be chat messages, the label null."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


def completion_of(
    query: str,
    prompt: str,
    end_marks: Sequence[str] | None = None,
    turn_mark: str | None = None,
) -> str:
    """Return the completion: the query after its prompt, without the marks at its end.

    end_marks: see `without_end_marks`.
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
    access: Access,
    token: Callable[[dict[bytes, bytes]], bytes] | None = None,
) -> BridgeMiddleware:
    """Return an ASGI application that answers JSON, and a text for Prometheus where it gets one.

    posts, gets: the functions that return the answers, by path; those of posts get the body. A
    UserError of theirs is answered with status 422, TimeoutError with 504, another error of ours
    with 502. access, token: see `BridgeMiddleware`.
    """
    from starlette.routing import Route, Router

    from scorekit.server.bridge import BridgeMiddleware
    from scorekit.server.connection import bearer_token

    routes = [
        *(Route(path, _posting(handle), methods=["POST"]) for path, handle in posts.items()),
        *(Route(path, _getting(render)) for path, render in gets.items()),
    ]
    # A redirect contains an address and a scheme. Behind a proxy the trainer cannot use them, and a
    # client that can would send its texts a second time. Not a Starlette, which answers exceptions
    # itself.
    router = Router(routes, redirect_slashes=False)
    return BridgeMiddleware(router, access, token or bearer_token)


def _posting(handle: Callable[[bytes], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            return _answer(await handle(await request.body()))
        except UserError as error:
            return _failure(422, error)
        except TimeoutError:
            return _failure(504, RequestError("timeout", "not scored before the deadline"))
        except ScorekitError as error:
            return _failure(502, error)

    return respond


def _getting(render: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return _answer(render())

    return respond


def _answer(content: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    if isinstance(content, str):
        return Response(content, media_type="text/plain; version=0.0.4")
    return Response(to_json(content), status, media_type="application/json")


def _failure(status: int, error: Exception) -> Response:
    message = " ".join(str(error).split())
    return _answer({"error": {"type": type(error).__name__, "message": message}}, status)
