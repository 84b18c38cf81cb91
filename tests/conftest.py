"""Fixtures and the marks that a test gets from its folder."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from scorekit.net.http_clients import ssl_context
from tests.kits import forked
from tests.kits.examples import register_profiles

# To load the tests makes a million objects that stay. The garbage collector would look through them
# again and again, for half of the time; so it is off until they are loaded, and leaves them out.
gc.disable()
register_profiles()
# By default structlog draws tracebacks with all locals: seconds on a busy machine.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)
_LOG = structlog.get_config()
# Test processes share two cores: one torch thread each, no network, caches in a folder of the run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# No code of ours uses torch.compile. bitsandbytes does when it is loaded, and with it comes a
# compiler: a second of CPU for each process that loads peft.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# A shell that starts a job in the background has it ignore SIGINT, and so would every child here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# httpx gives up after 5 s by default; a busy machine may take longer to answer a test.
for _name in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _name, 180.0)


# httpx makes an SSL context for every client, also for one that speaks plain HTTP: 50 ms of CPU.
def _same_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
    """Return the context of the last client with these arguments, where nothing else decides."""
    if verify is True and cert is None and trust_env:
        return ssl_context()
    return httpx.create_ssl_context(verify, cert, trust_env)


httpx._transports.default.create_ssl_context = _same_ssl_context
# What the shell of a developer happens to export must not change a result.
_OURS = ("SCOREKIT_", "METRICX_", "XCOMET_", "JUDGE_", "EMBEDDER_", "VLLM_")
for _name in [name for name in os.environ if name.startswith(_OURS)]:
    del os.environ[_name]
# Which kernels are faster depends on the machine. Tests of the packed ones ask for them by name.
os.environ["SCOREKIT_MATMUL"] = "torch"
# To read the certificates that these name takes each client 20 ms. The one test that leaves the
# machine finds them under another name.
for _name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
    if _name in os.environ:
        os.environ[f"SHELLS_{_name}"] = os.environ.pop(_name)

TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Start the session's fork servers, once for all test processes."""
    if not hasattr(config, "workerinput"):
        forked.start_servers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder: unit, integration, golden or e2e."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, folder))


def pytest_collection_finish() -> None:
    """Collect garbage of the tests, and leave out what was loaded for them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Restore logging after a test, because a command in this process logs to its own folder."""
    yield
    structlog.configure(**_LOG)
    scorekit_logger = logging.getLogger("scorekit")
    scorekit_logger.handlers = []
    scorekit_logger.setLevel(logging.NOTSET)


@pytest.fixture
def no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients of this process wait so long before a retry that no deadline allows it.

    So a test of failures needs no deadline that a stalled machine could miss.
    """
    monkeypatch.setattr("scorekit.net.retry._backoff", lambda state: math.inf)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of this run. Tests never read or write the user's real one."""
    home = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(home)
    return home


@pytest.fixture(scope="session")
def metricx_golden() -> dict:
    """Return scores by upstream's code in float64; see tests/golden/metricx_tiny/README.md."""
    return json.loads((TESTS / "golden/metricx_tiny/golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def metricx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the expanded golden checkpoint, which is an ordinary MetricX folder."""
    from tests.kits.metricx_checkpoints import expand_golden

    folder = tmp_path_factory.mktemp("metricx")
    expand_golden(TESTS / "golden/metricx_tiny", folder)
    return folder
