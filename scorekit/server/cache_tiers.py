"""Cache tiers that outlive the process: a SQLite file or a Redis/Valkey server, bytes by key.

Errors (a dead server, a full disk, a locked file) are raised unchanged. `cache.py` sets the
timeouts and treats every error as a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import structlog
from platformdirs import user_cache_path
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.score_database import ScoreDatabase

log = structlog.get_logger()


class CacheTier(Protocol):
    """Stores bytes by key. A call may raise any error, and any value may be lost.

    timeout_s: the caller cancels a `get` or `set` after so many seconds.
    A call may be cancelled at any time; the next call must not receive its reply.
    """

    timeout_s: float

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def set(self, values: Mapping[bytes, bytes]) -> None: ...

    async def close(self) -> None: ...


class SQLiteTier:
    """A SQLite file with one writer thread and one reader thread: no read waits for a write.

    Above `max_bytes` each write deletes twice as many of the oldest values as it adds. The
    write-ahead log is bounded.
    """

    #: A page that is not in memory costs milliseconds on a slow disk, and a batch reads many pages.
    timeout_s = 0.5
    _BUSY_S = 0.1  # max wait for a lock of another process

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._write_file = ScoreDatabase(path, self._BUSY_S, self._log_damage, max_bytes)
        self._read_file = ScoreDatabase(path, self._BUSY_S, self._log_damage)
        try:
            self._write_file.open()
            self._read_file.open()
        except (sqlite3.Error, OSError) as error:
            self._write_file.close()
            raise UserError(
                f"--cache {path}: {error}; name another file or delete this one"
            ) from None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sqlite-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sqlite-read")

    def _log_damage(self, aside: Path) -> None:
        log.warning("cache_file_damaged", path=f"{self._path}", moved_to=f"{aside}")

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values in the order of the keys."""
        loop = asyncio.get_running_loop()
        value_by_key = await loop.run_in_executor(self._reader, self._read_file.get, keys)
        return [value_by_key.get(key) for key in keys]

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all values in one transaction."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._write_file.set, values)

    async def close(self) -> None:
        """Close the file; writes that have not started are dropped."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        for thread, file in ((self._reader, self._read_file), (self._writer, self._write_file)):
            thread.shutdown(cancel_futures=True)
            file.close()


class RedisTier:
    """A Redis or Valkey server; give it `maxmemory` and `maxmemory-policy allkeys-lru`.

    redis-py closes the connection of a call that is cancelled or times out between its command
    and the reply; `tests/integration/scorekit/server/test_redis.py` checks that.
    """

    #: A local server answers in a fraction of a millisecond; above this limit scoring is cheaper.
    timeout_s = 0.1
    #: Scores of an old model revision are never read again, and a server without `maxmemory` would
    #: keep them forever. The random part keeps the scores of one job from expiring at once.
    _KEEP_S = 30 * 24 * 3600
    _SPREAD_S = 3 * 24 * 3600

    def __init__(self, url: str, password: SecretStr | None) -> None:
        import redis.asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        secret = {"password": password.get_secret_value()} if password else {}
        try:
            _refuse_password(url)
            # The client's retries and timeouts would stall a request for seconds if the server is
            # down. The caller's timeout covers the full round trip, including the connection.
            self._redis: Any = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=None,
                socket_connect_timeout=self.timeout_s,
                retry=Retry(NoBackoff(), 0),
                **secret,
            )
        except ValueError as error:
            raise UserError(f"--cache: {error}") from None
        self._policy_check: asyncio.Task[None] | None = None

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values with one MGET."""
        if self._policy_check is None:
            self._policy_check = asyncio.create_task(self._check_policy())
        values: list[bytes | None] = await self._redis.execute_command("MGET", *map(_name, keys))
        return values

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all values in one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, value in values.items():
            seconds = self._KEEP_S + random.randrange(self._SPREAD_S)
            pipeline.execute_command("SET", _name(key), value, "EX", seconds)
        await pipeline.execute()

    async def close(self) -> None:
        """Close the connections."""
        if self._policy_check is not None:
            self._policy_check.cancel()
        await self._redis.aclose()

    async def _check_policy(self) -> None:
        """Warn once if a full server will refuse new scores. Errors are ignored, for example if the
        server does not support the command."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self.timeout_s):
                memory = await self._redis.info("memory")
            if memory["maxmemory"] and memory["maxmemory_policy"] == "noeviction":
                log.warning(
                    "redis_will_refuse_when_full",
                    maxmemory=memory["maxmemory"],
                    advice="set maxmemory-policy to allkeys-lru",
                )


def _name(key: bytes) -> bytes:
    return b"scorekit:" + key


def _refuse_password(url: str) -> None:
    parts = urlsplit(url)
    if parts.password or "password" in parse_qs(parts.query):
        raise ValueError(
            "a password in the address can be read in `ps` and in logs; "
            "set SCOREKIT_REDIS_PASSWORD instead"
        )


def _file_in(path_text: str) -> Path:
    """Return the path after `sqlite://`.

    Raises UserError if its first folder does not exist: other programs read three slashes as a path
    in the current folder, but here it is a path from the root."""
    path = Path(path_text)
    if path.is_absolute() and not (len(path.parts) > 2 and Path(*path.parts[:2]).is_dir()):
        relative = path.relative_to(path.anchor)
        raise UserError(
            f"--cache sqlite://{path_text}: this is {path}, under the root, where no such folder "
            f"is; in the current folder it is sqlite://{relative}"
        )
    return path


def open_tier(
    target: str, *, name: str, max_bytes: int, redis_password: SecretStr | None
) -> CacheTier | None:
    """Return the second tier that `--cache` selects. name: file name of the default SQLite file."""
    scheme, _, path_text = target.partition("://")
    match scheme:
        case "memory":
            return None
        case "sqlite":
            path = (
                _file_in(path_text) if path_text else user_cache_path("scorekit") / f"{name}.sqlite"
            )
            return SQLiteTier(path, max_bytes)
        case "redis" | "rediss" | "unix":
            return RedisTier(target, redis_password)
    raise UserError(
        f"--cache {scheme!r}: give memory, sqlite, sqlite:///PATH, sqlite://RELATIVE or redis://HOST:PORT"
    )
