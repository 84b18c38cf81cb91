"""The scoring services as Ray Serve applications: replicas, GPUs, autoscaling, several machines.

    serve deploy deploy/ray/serve.yaml

A replica holds what the plain service holds: backend, queue, batcher and cache, behind the same
routes. A request goes whole to one replica, whose batcher puts it together with those of other
callers. `args` of an application are the service's settings (`model: ...`, `dtype: ...`,
`cache: redis://...`); secrets come from the environment of the replicas, as everywhere.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from scorekit.errors import UserError

#: Service -> its settings, and what makes its backend of them.
_SERVICES = {
    "metricx": ("services.metricx.settings:MetricXSettings", "services.metricx.__main__"),
    "xcomet": ("services.xcomet.settings:XCometSettings", "services.xcomet.__main__"),
    "judge": ("services.judge.settings:JudgeSettings", "services.judge.__main__"),
    "fake": ("scorekit.server.fake:FakeSettings", "scorekit.server.fake"),
}


def metricx(args: dict[str, Any]) -> Application:
    """MetricX; args: fields of its settings."""
    return _application("metricx", args)


def xcomet(args: dict[str, Any]) -> Application:
    """xCOMET; args: fields of its settings."""
    return _application("xcomet", args)


def judge(args: dict[str, Any]) -> Application:
    """The judge; args: fields of its settings."""
    return _application("judge", args)


def fake(args: dict[str, Any]) -> Application:
    """A model of known answers and a given time, for benchmarks."""
    return _application("fake", args)


def _application(service: str, args: dict[str, Any]) -> Application:
    """Wrong settings fail the deployment at once, not each replica again and again."""
    make_settings(service, args)
    return Scorer.bind(service, args)


def make_settings(service: str, args: dict[str, Any]) -> Any:
    """Settings of a service, as its command line would make them. Raises UserError."""
    from scorekit.server.settings import parse_settings

    module, name = _SERVICES[service][0].split(":")
    settings_type = getattr(importlib.import_module(module), name)
    unknown = sorted(set(args) - set(settings_type.model_fields))
    if unknown:
        raise UserError(f"{service}: unknown setting {unknown[0]!r}")
    # The proxy listens, not the replica; its keys are checked by the replica as ever.
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in args.items()]
    return parse_settings(settings_type, flags)


#: The app of the one replica that a process of Ray holds.
_replica_app: FastAPI | None = None


def _keep(app: FastAPI) -> None:
    """Apart from the class below, which Ray pickles by value, its globals with it."""
    global _replica_app
    _replica_app = app


def _app() -> FastAPI:
    assert _replica_app is not None
    return _replica_app


@serve.deployment(
    max_ongoing_requests=256,
    max_queued_requests=1024,
    backpressure_config={"status_code": 429, "retry_after_s": 1.0},
    graceful_shutdown_timeout_s=75.0,
)
@serve.ingress(_app)
class Scorer:
    """One replica of a service."""

    async def __init__(self, service: str, args: dict[str, Any]) -> None:
        from scorekit.server.app import create_app

        settings = make_settings(service, args)
        backend = importlib.import_module(_SERVICES[service][1]).make_backend(settings)
        app = create_app(backend, settings)
        app.router.lifespan_context = _until_ready(app)
        _keep(app)

    async def check_health(self) -> None:
        """Ray replaces a replica whose model is hung, dead or sick."""
        if (fault := _app().state.service.unready()) is not None:
            raise RuntimeError(fault)


def _until_ready(app: FastAPI) -> Any:
    """The app's lifespan, which begins when the model is loaded and warm: Ray sends requests to a
    replica from then on, and a model that cannot be loaded fails the deployment."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(of: FastAPI) -> AsyncIterator[Any]:
        async with inner(of) as state:
            await of.state.loading
            while of.state.service.unready() is not None:
                await asyncio.sleep(0.05)
            yield state

    return lifespan
