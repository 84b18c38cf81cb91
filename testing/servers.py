"""Real services on real ports, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from scorekit.net.http_clients import sync_client
from scorekit.server.app import create_app
from scorekit.server.backend import Backend, Encoded, Outcome
from scorekit.server.fake import FakeBackend
from scorekit.server.run import service_config
from scorekit.server.settings import ModelSettings, Secrets
from testing.processes import free_port as free_port

#: Only stops a hang: even on a busy machine no test waits this long.
PATIENCE_S = 180.0


#: Headers of a body that is given as bytes.
JSON = {"Content-Type": "application/json"}


class Held(FakeBackend):
    """A model that answers only while `go` is set. It sets `entered` when it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()

    def hold(self) -> None:
        """Block all answers from now on."""
        self.go.clear()
        self.entered.clear()

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Answer like a FakeBackend, once it is allowed to."""
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        return super().forward(batch)


class _Started:
    """An app that remembers which application its lifespan has started.

    That of a service loads its model then. A wrapper passes the event on, so `app` is the inner
    one; an app that answers the event itself leaves it None.
    """

    def __init__(self, app: Any) -> None:
        self._asgi, self.app = app, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass everything on."""
        if scope["type"] != "lifespan":
            return await self._asgi(scope, receive, send)

        async def send_on(message: Any) -> None:
            self.app = scope.get("app")
            await send(message)

        await self._asgi(scope, receive, send_on)

    def is_loading(self) -> bool:
        """Return whether a service loads its model."""
        task = getattr(self.app.state, "loading", None) if self.app else None
        return task is not None and not task.done()


@contextlib.contextmanager
def running_app(
    app: Any, config: uvicorn.Config | None = None, port: int = 0, *, loaded: bool = True
) -> Iterator[str]:
    """Serve an ASGI app under uvicorn in a thread; yield its URL.

    port: 0 picks a free one.
    loaded: if the app is a service, or passes requests on to one, yield only once its model is
    loaded or has failed to load. No request is sent to find out.
    """
    config = config or uvicorn.Config(app, log_config=None, lifespan="on")
    config.app = started = _Started(config.app)
    server = uvicorn.Server(config)
    listener = socket.socket()
    # Lets another server use the port a moment later: the flag of the first socket counts, too.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)  # a client that connects before the thread runs waits, and is not refused
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        if loaded:
            wait_until(lambda: server.started or not thread.is_alive())
            wait_until(lambda: not started.is_loading())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def running_service(
    backend: Backend, secrets: Secrets | None = None, **settings: Any
) -> Iterator[str]:
    """Serve a backend as run.py does until the block ends; yield its URL once it is ready."""
    settings.setdefault("cache", "memory")
    # A busy machine or a held model must not look like a hanging batch or a slow client.
    settings.setdefault("stall_after", PATIENCE_S)
    settings.setdefault("receive_timeout_s", PATIENCE_S)
    checked = ModelSettings(**settings)
    app = create_app(backend, checked, secrets)
    with running_app(app, service_config(app, checked)) as url:
        wait_ready(url)
        if isinstance(backend, FakeBackend):
            backend.batches.clear()  # those of the warm-up
        yield url


def wait_ready(url: str, timeout_s: float = PATIENCE_S) -> None:
    """Return when the service at `url` is ready."""
    deadline = time.monotonic() + timeout_s
    with sync_client(str(url), timeout_s=PATIENCE_S) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health/ready").status_code == 200:
                    return
            time.sleep(0.02)
    raise TimeoutError(f"{url} did not become ready")


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie counts as dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Return when `condition` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)
