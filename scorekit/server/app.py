"""The HTTP interface of a service: routes, limits, errors. service.py does the work.

`RequestMiddleware` stands before all routes: request id, API key, access log, counters.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import scorekit
from scorekit.errors import RequestError
from scorekit.schemas import SCHEMA_VERSION, ErrorResponse
from scorekit.server.backend import Backend
from scorekit.server.connection import Access, AllowedHosts, bearer_token, has_body, refuse
from scorekit.server.endpoint import LARGE, Line
from scorekit.server.metrics import Metrics
from scorekit.server.page import add_docs_route, add_page
from scorekit.server.page.rows import MAX_BODY_BYTES, answer_rows
from scorekit.server.pools import PendingRequest
from scorekit.server.receive import RequestSchema, read_body, read_query, read_request
from scorekit.server.service import MANY, ScoringService
from scorekit.server.settings import Secrets, ServiceSettings, load_api_keys

log = structlog.get_logger()

#: The id of the current request; run.py writes it into each log line of the request.
request_id_now: ContextVar[str] = ContextVar("request_id_now")

#: Paths of the page: the second one leads to the first.
_PAGE = ("/", "/docs")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


def create_app(
    backend: Backend, settings: ServiceSettings, secrets: Secrets | None = None
) -> FastAPI:
    """Create the application of one service. The model loads after start-up, in the background."""
    secrets = secrets or Secrets()
    service = ScoringService(backend, settings, secrets)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.loading = asyncio.create_task(service.start())
        yield
        app.state.loading.cancel()
        await service.close()

    app = FastAPI(
        title=f"scorekit {backend.service}",
        version=str(SCHEMA_VERSION),
        lifespan=lifespan,
        # A redirect would name an address and a scheme that behind a proxy are not the client's.
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages need a script from elsewhere; /openapi.json stays
        redoc_url=None,
    )
    app.state.service = service
    page = backend.endpoint.page if settings.page else None
    keys = load_api_keys(settings, secrets)
    hosts = AllowedHosts((settings.host, *settings.allowed_hosts))
    app.add_middleware(
        RequestMiddleware, keys=keys, metrics=service.metrics, hosts=hosts, page=page is not None
    )
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    endpoints = (backend.endpoint, *backend.endpoint.compat_endpoints)
    shapes = [RequestSchema(e, e.request_type(settings.max_samples)) for e in endpoints]
    for shape in shapes:
        _add_verb_routes(app, service, shape)
    _add_other_routes(app, service)
    backend.endpoint.add_routes(app)
    add_docs_route(app, page is not None)
    if page is not None:
        add_page(app, page, backend.service)
    if page == "translations":
        _add_rows_route(app, service)
    _describe_requests(app, shapes)
    return app


RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]
#: Seconds after which the client of a request is watched for a disconnect.
WATCH_AFTER_S = 0.02


class DirectRoute(APIRoute):
    """A route whose endpoint handles the request directly.

    FastAPI documents it, but its dependencies and serialization would only cost time."""

    def get_route_handler(self) -> RouteHandler:
        """Return the endpoint."""
        return self.endpoint


_STREAM_ANSWER = {
    "description": 'One result a line with its `index`, then `{"done": true, ...}`.',
    "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
}


def _add_verb_routes(app: FastAPI, service: ScoringService, shape: RequestSchema) -> None:
    statuses = (400, 403, 408, 413, 415, 422, 429, 431, 500, 503, 504)
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse} for status in statuses
    }
    endpoint = shape.endpoint
    router = APIRouter(route_class=DirectRoute)
    router.add_api_route(
        endpoint.path,
        _answering(service, shape),
        methods=[endpoint.method],
        name=endpoint.name,
        description=endpoint.about,
        responses={200: {"model": endpoint.response_type}, **refusals},
    )
    if endpoint.streams:
        router.add_api_route(
            f"{endpoint.path}/stream",
            _streaming(service, shape),
            methods=["POST"],
            name=f"{endpoint.name}_stream",
            responses={200: _STREAM_ANSWER, **refusals},
            response_class=StreamingResponse,
        )
    app.include_router(router)


def _answering(service: ScoringService, shape: RequestSchema) -> RouteHandler:
    async def ask(request: Request) -> Response:
        with ExitStack() as exit_stack:
            parsed, job = await _open_job(service, shape, request, exit_stack)
            watch = _Watch(request, job)
            try:
                await service.finish(job)
            finally:
                watch.end()
                service.close_job(job)
            parts = shape.endpoint.render_response(parsed, job.answers, job.cached, service.model)
            num_bytes = sum(len(answer) for answer in job.answers if isinstance(answer, bytes))
            if len(job.answers) <= MANY and num_bytes <= LARGE:
                body = b"".join(parts)
                return Response(body, media_type="application/json", headers=_times(job))
            return _Parts(_yielding(parts), exit_stack.pop_all(), "application/json", _times(job))

    return ask


def _streaming(service: ScoringService, shape: RequestSchema) -> RouteHandler:
    async def ask_stream(request: Request) -> Response:
        """The same request; one result a line, in order of completion.

        A stream without its last line has failed: ask again for the missing indexes.
        """
        with ExitStack() as exit_stack:
            parsed, job = await _open_job(service, shape, request, exit_stack)
            exit_stack.callback(service.close_job, job)
            watch = _Watch(request, job)
            indexes = service.stream(job)
            try:
                # The first result comes before the header: no result in time is a 504.
                first = await anext(indexes)
            finally:
                watch.end()  # from here on the response itself notices a disconnect
            lines = _lines(shape.endpoint.lines(parsed), job, first, indexes)
            return _Parts(lines, exit_stack.pop_all(), "application/x-ndjson", _times(job))

    return ask_stream


async def _open_job(
    service: ScoringService, shape: RequestSchema, request: Request, exit_stack: ExitStack
) -> tuple[Any, PendingRequest]:
    service.refuse_if_unavailable()  # before the body is read
    share = exit_stack.enter_context(service.budget.share())
    if shape.endpoint.method == "GET":
        parsed = read_query(request, shape)
    else:
        parsed = await read_request(request, shape, service.settings, share)
    job = await service.open_job(parsed, share.size, shape.endpoint)
    if (key := request.scope.get("key_id")) is not None:
        service.metrics.key_samples.labels(key).inc(len(job.answers))
    return parsed, job


class _Parts(StreamingResponse):
    """An answer written as it is read; `exit_stack` closes at its end, also after a disconnect."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        exit_stack: ExitStack,
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(parts, media_type=media_type, headers=headers)
        self._exit_stack = exit_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        with self._exit_stack:
            await super().__call__(scope, receive, send)


async def _yielding(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts, and let other coroutines run between two of them."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def _lines(
    line: Line, job: PendingRequest, first: int, further_indexes: AsyncIterator[int]
) -> AsyncIterator[bytes]:
    yield line(first, job.answers[first], first in job.cached)
    async for index in further_indexes:
        yield line(index, job.answers[index], index in job.cached)
    good = sum(isinstance(answer, bytes) for answer in job.answers)
    yield to_json({"done": True, "ok": good, "failed": len(job.answers) - good}) + b"\n"


def _times(job: PendingRequest) -> dict[str, str]:
    """Return milliseconds of a request's stages as headers; the middleware adds X-Total-Time."""
    return {
        "X-Tokenise-Time": f"{job.tokenise_s * 1000:.2f}",
        "X-Queue-Time": f"{job.queue_s * 1000:.2f}",
        "X-Model-Time": f"{job.model_s * 1000:.2f}",
    }


class _Watch:
    """Ends a job when its client disconnects, because nothing would read the answer.

    It starts after `WATCH_AFTER_S`: a task would cost each short request a twentieth of its time.
    An earlier disconnect is noticed then.
    """

    def __init__(self, request: Request, job: PendingRequest) -> None:
        self._request, self._job = request, job
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._job.finish(ClientDisconnect())

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _add_other_routes(app: FastAPI, service: ScoringService) -> None:
    @app.get(
        "/v1/info",
        response_model=service.endpoint.info_type,
        responses={503: {"model": ErrorResponse}},
    )
    async def info() -> BaseModel:
        """What the model is, what it can take, and which code runs it."""
        if not service.loaded:
            raise RequestError("unavailable", "the model is loading", retry_after=5.0)
        return _info(service)

    @app.get("/health/live")
    async def live() -> dict[str, bool]:
        """The process answers."""
        return {"live": True}

    @app.get("/health/ready", responses={503: {"model": ErrorResponse}})
    async def ready() -> dict[str, bool]:
        """The model answers, and new work is taken."""
        if (reason := service.unavailable_reason()) is not None:
            raise RequestError("unavailable", reason, retry_after=5.0)
        return {"ready": True}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures in Prometheus' text format."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_rows_route(app: FastAPI, service: ScoringService) -> None:
    @app.post("/page/rows", include_in_schema=False)
    async def rows(request: Request) -> Response:
        """Answer what the rows are that a person gives to the page."""
        service.refuse_if_unavailable()
        with service.budget.share() as share:
            body = await read_body(request.stream(), request.headers, MAX_BODY_BYTES, share)
            request.scope["body_read"] = True
            async with share.budget.parsing:
                answer = await asyncio.to_thread(answer_rows, body)
        return Response(answer, media_type="application/json")


#: Fields of a description that `GET /v1/info` has as they are.
_DESCRIPTION_FIELDS = (
    *("model", "revision", "tokenizer", "dtype", "device", "max_input_length", "matmul"),
)


def _info(service: ScoringService) -> BaseModel:
    description = service.description
    memory = service.backend.memory_bytes()
    scorekit_version: dict[str, str | None] = {"scorekit": scorekit.__version__}
    return service.endpoint.info(
        {
            "service": service.backend.service,
            **{name: getattr(description, name) for name in _DESCRIPTION_FIELDS},
            "max_samples": service.settings.max_samples,
            "max_body_bytes": service.settings.max_body_bytes,
            "versions": description.versions | scorekit_version,
            "commit": scorekit.commit(),
            "device_memory_bytes": memory[0] if memory else None,
        },
        description,
    )


def _error_response(error: RequestError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = f"{max(1, round(error.retry_after))}"
    return Response(
        to_json({"error": error.wire()}),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    type = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = _error_response(RequestError(type, error.detail, status=error.status_code))
    response.headers.update(error.headers or {})  # Allow
    return response


def _describe_requests(app: FastAPI, shapes: Sequence[RequestSchema]) -> None:
    """Add the schemas of requests: bodies are read by hand, because limits come first."""
    default = app.openapi

    def openapi() -> dict[str, Any]:
        document = default()
        for shape in shapes:
            _describe_request(document, shape)
        _describe_keys(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_request(document: dict[str, Any], shape: RequestSchema) -> None:
    name, path = shape.request_type.__name__, shape.endpoint.path
    schema = shape.request_type.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    if shape.endpoint.method == "GET":
        document["paths"][path]["get"]["parameters"] = [
            {"name": field, "in": "query", "required": True, "schema": field_schema}
            for field, field_schema in schema["properties"].items()
        ]
        return
    document["components"]["schemas"] |= definitions | {name: schema}
    body = {"$ref": f"#/components/schemas/{name}"}
    for route in (path, f"{path}/stream"):
        if route in document["paths"]:
            document["paths"][route]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": body}},
            }


def _describe_keys(document: dict[str, Any]) -> None:
    """Document keys as optional: the settings decide whether a service needs one."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema = {"$ref": "#/components/schemas/ErrorResponse"}
    refusal = {"description": "Unauthorized", "content": {"application/json": {"schema": schema}}}
    for path, operations in document["paths"].items():
        if not path.startswith("/health/"):
            for operation in operations.values():
                operation["security"] = [{"key": []}, {}]
                operation["responses"]["401"] = refusal


class RequestMiddleware:
    """ASGI middleware. Health checks are open, and so is the page at `/`, which has no data.

    Everything else needs a key if one is configured. If none is, pages of other sites are refused.
    HEAD is GET whose body the server does not send.

    page: whether there is a page.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[bytes, ...],
        metrics: Metrics,
        hosts: AllowedHosts,
        page: bool = False,
    ) -> None:
        self.app = app
        self.page = page
        self.access = Access(keys, hosts)
        self.keys = {key: key_id(key) for key in keys}
        self.metrics = metrics
        for name in self.keys.values():  # as many as are configured; a wrong key has no series
            metrics.key_requests.labels(name)
            metrics.key_samples.labels(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        raw_id = headers.get(b"x-request-id", b"")
        request_id = raw_id.decode() if _REQUEST_ID.fullmatch(raw_id) else uuid.uuid4().hex
        request_id_now.set(request_id)
        started = time.perf_counter()
        status = 0
        token = bearer_token(headers) if self.keys else b""
        connection_scope = scope
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection reads its own
        scope["key_id"] = self.keys.get(token) if self.access.has_key(token) else None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed_ms = f"{(time.perf_counter() - started) * 1000:.2f}"
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                    (b"x-total-time", elapsed_ms.encode()),
                ]
                if status >= 400 and not scope.get("body_read") and has_body(headers):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            is_page = self.page and _path(scope) in _PAGE and scope["method"] == "GET"
            error = self.access.refusal(
                _path(scope), scope["headers"], headers, token, is_page=is_page
            )
            if error is None:
                await self.app(scope, receive, send_marked)
            else:
                await refuse(send_marked, error)
        except ClientDisconnect:
            # Nothing reads the answer: the client disconnected, or connection.py closed the
            # connection.
            status = connection_scope.get("cut_off", 499)
        except asyncio.CancelledError:
            # Ray cancels when the client disconnects.
            status = status or connection_scope.get("cut_off", 499)
            raise
        except Exception:
            log.error("bug", exc_info=True)
            if not status:
                message = f"a bug; see the log for request {request_id}"
                await refuse(send_marked, RequestError("internal", message))
        finally:
            self._note(scope, token, status, time.perf_counter() - started)

    def _note(self, scope: Scope, token: bytes, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        if scope["key_id"] is not None:
            self.metrics.key_requests.labels(scope["key_id"]).inc()
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.request_seconds.labels(route).observe(seconds)
        quiet = route.startswith("/health/") or route == "/metrics"
        (log.debug if quiet else log.info)(
            "request",
            route=route,
            status=status,
            ms=round(seconds * 1000, 2),
            **_origin(scope, token, route),
        )


def key_id(key: bytes) -> str:
    """Return a key's id in logs and metrics: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:8]


def _origin(scope: Scope, token: bytes, route: str) -> dict[str, str]:
    """Return the origin of a request for the log.

    It has the peer's address and the id of its key, also of a wrong one. If no route handled the
    request, it has the path, unless that is unknown and so text of the sender."""
    origin = {}
    if scope.get("client"):
        origin["peer"] = scope["client"][0]
    if token:
        origin["key"] = key_id(token)
    if route == "other":
        path = _path(scope)
        if any(path == getattr(app_route, "path", "") for app_route in scope["app"].routes):
            origin["path"] = path
    return origin


def _path(scope: Scope) -> str:
    # Behind a proxy with a prefix (Ray Serve), the path begins with it.
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
