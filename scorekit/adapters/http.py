"""Requests and routes of the bridges: servers in the form that another trainer asks for.

Connections, limits and refusals are those of our services (`scorekit/server/bridge.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from scorekit.config import describe_validation_error
from scorekit.errors import RequestError, ScorekitError, UserError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from scorekit.server.bridge import BridgeMiddleware
    from scorekit.server.connection import Access

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=BaseModel)
#: Different refusals that are logged, each once.
MAX_LOGGED = 20


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
    with 502. It is logged, too: some trainers show the status alone.
    access, token: see `BridgeMiddleware`.
    """
    from starlette.routing import Route, Router

    from scorekit.server.bridge import BridgeMiddleware
    from scorekit.server.connection import bearer_token

    logged: set[str] = set()
    routes = [
        *(
            Route(path, _posting(handle, logged), methods=["POST"])
            for path, handle in posts.items()
        ),
        *(Route(path, _getting(render)) for path, render in gets.items()),
    ]
    # A redirect contains an address and a scheme. Behind a proxy the trainer cannot use them, and a
    # client that can would send its texts a second time. Not a Starlette, which answers exceptions
    # itself.
    router = Router(routes, redirect_slashes=False)
    return BridgeMiddleware(router, access, token or bearer_token)


def _posting(
    handle: Callable[[bytes], Awaitable[Any]], logged: set[str]
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            return _answer(await handle(await request.body()))
        except UserError as error:
            return _failure(422, error, logged)
        except TimeoutError:
            return _failure(504, RequestError("timeout", "not scored before the deadline"), logged)
        except ScorekitError as error:
            return _failure(502, error, logged)

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


def _failure(status: int, error: Exception, logged: set[str]) -> Response:
    message = " ".join(str(error).split())
    line = f"HTTP {status}: {message}"
    if line not in logged and len(logged) < MAX_LOGGED:
        logged.add(line)
        end = "" if len(logged) < MAX_LOGGED else " (further ones are not logged)"
        log.warning("a request was refused, %s%s", line, end)
    return _answer({"error": {"type": type(error).__name__, "message": message}}, status)
