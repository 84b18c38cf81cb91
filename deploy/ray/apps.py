"""The scoring services as Ray Serve applications: replicas, GPUs, autoscaling, several machines.

    serve deploy deploy/ray/serve.yaml

A replica holds what the plain service holds: backend, queue, batcher and cache, behind the same
routes. A request goes whole to one replica, whose batcher puts it together with those of other
callers. `args` of an application are the service's settings (`model: ...`, `dtype: ...`,
`cache: redis://...`); secrets come from the environment of the replicas, as everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorekit.config import describe_validation_error
from scorekit.errors import UserError

#: Service -> its settings class, and the module with `make_backend`.
_SERVICES = {
    "metricx": ("services.metricx.settings:MetricXSettings", "services.metricx.__main__"),
    "xcomet": ("services.xcomet.settings:XCometSettings", "services.xcomet.__main__"),
    "judge": ("services.judge.settings:JudgeSettings", "services.judge.__main__"),
    "embedder": ("services.embedder.settings:EmbedderSettings", "services.embedder.__main__"),
    "retriever": ("services.retriever.settings:RetrieverSettings", "services.retriever.__main__"),
    "reward_model": (
        "services.reward_model.settings:RewardModelSettings",
        "services.reward_model.__main__",
    ),
    "fake": ("scorekit.server.fake:FakeSettings", "scorekit.server.fake"),
}
#: Settings that Ray's proxy handles.
_PROXY_SETTINGS = {"host", "port", "receive_timeout_s", "drain_s"}


def _application(service: str, args: dict[str, Any]) -> Application:
    """Return the application; wrong settings fail the deployment, not every replica."""
    make_settings(service, args)
    return Scorer.bind(service, args)  # type: ignore[attr-defined]  # of the decorator


def _builder(service: str) -> Callable[[dict[str, Any]], Application]:
    def build(args: dict[str, Any]) -> Application:
        """Build the application of a service.

        args: fields of its settings.
        """
        return _application(service, args)

    return build


#: Functions for `import_path`. Every node needs the retriever's index. `fake` is for tests and
#: benchmarks: a model with known answers and a fixed time per call.
metricx, xcomet, judge = _builder("metricx"), _builder("xcomet"), _builder("judge")
embedder, retriever, fake = _builder("embedder"), _builder("retriever"), _builder("fake")
reward_model = _builder("reward_model")


def make_settings(service: str, args: dict[str, Any]) -> Any:
    """Return a replica's settings: `args`, then environment, then defaults. Raises UserError."""
    module, name = _SERVICES[service][0].split(":")
    settings_type = getattr(importlib.import_module(module), name)
    allowed = set(settings_type.model_fields) - _PROXY_SETTINGS
    if unknown := sorted(set(args) - allowed):
        raise UserError(f"{service}: args: unknown setting {unknown[0]!r}")
    try:
        # As reachable as the proxy: without keys it takes `no_auth: true`.
        settings = settings_type(host="0.0.0.0", **args)
    except ValidationError as error:
        raise UserError(f"{service}: args: {describe_validation_error(error)}") from None
    if "cache" not in settings.model_fields_set:
        # The default is a file, which only one process can use.
        settings = settings.model_copy(update={"cache": "memory"})
    return settings


@serve.deployment(
    max_ongoing_requests=256,
    max_queued_requests=1024,
    backpressure_config={"status_code": 429, "retry_after_s": 1.0},
    graceful_shutdown_timeout_s=75.0,
)
@serve.ingress()
class Scorer:
    """One replica of a service. Ray sends requests once the model is loaded and warm."""

    async def __init__(self, service: str, args: dict[str, Any]) -> None:  # type: ignore[misc]
        from scorekit.server.app import create_app
        from scorekit.server.run import prepare_process

        settings = make_settings(service, args)
        prepare_process(settings.log_level)
        backend = importlib.import_module(_SERVICES[service][1]).make_backend(settings)
        self._app = create_app(backend, settings)
        self._app.router.lifespan_context = _until_closed
        self._app.add_middleware(_OneRequestId)
        # Not in the lifespan, so that the deployment fails with the original error.
        await self._app.state.service.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app for Ray."""
        return self._app

    async def check_health(self) -> None:
        """Raise RuntimeError if the model hangs, fails or has ended, so that Ray replaces it."""
        if (reason := self._app.state.service.unavailable_reason()) is not None:
            raise RuntimeError(reason)


@asynccontextmanager
async def _until_closed(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.service.close()


class _OneRequestId:
    """Removes the request's id from the response, because Ray's proxy adds it again."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_ids = {
                    name: value for name, value in scope["headers"] if name == b"x-request-id"
                }
                message["headers"] = [h for h in message["headers"] if h not in request_ids.items()]
            await send(message)

        await self.app(scope, receive, send_without)
